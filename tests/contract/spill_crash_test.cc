// kill -9 of a process under load, with everything that it had not synced taken away: what is found
// is what was acknowledged, whole, and nothing else.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/random.h"
#include "kvstore/media/rocksdb_spill_store.h"
#include "tests/contract/spill_crash_log.h"
#include "tests/support/rocksdb_faulty_fs.h"
#include "tests/support/run_program.h"
#include "tests/support/scratch_folder.h"

namespace kvt {
namespace {

class SpillCrashTest : public testing::Test {
 protected:
  // Starts the writer, kills it at a random instant and takes away what was not synced.
  PowerLoss KillOnce(Random& random, bool lying) {
    const absl::Duration life = absl::Milliseconds(5 + random.Below(350));
    Program writer({absl::StrCat(KVT_BINARY_DIR, "/bin/spill_crash_writer"), folder_, journal_,
                    log_, absl::StrCat(random.Below(1'000'000)),
                    absl::StrCat(model_.version_max() + 1), lying ? "1" : "0"});
    // It says one byte when it writes. One in four is killed so long after its start, while it
    // opens perhaps.
    if (random.Below(4) != 0) {
      EXPECT_TRUE(writer.AwaitOutput(1, absl::Seconds(20)));
    }
    (void)writer.AwaitOutput(2, life);
    writer.Signal(SIGKILL);
    const ProgramResult result = writer.Finish(absl::Seconds(20));
    EXPECT_EQ(result.code, 128 + SIGKILL) << result.err;
    model_.Read(log_);
    return LosePower(journal_);
  }
  // What is wrong after it.
  std::vector<std::string> Look() {
    RocksDbSpillOptions options;
    options.folder = folder_;
    options.quota_bytes = kCrashQuotaBytes;
    auto store = OpenRocksDbSpillStore(options);
    if (!store.ok()) return {absl::StrCat("does not open: ", store.status().ToString())};
    return model_.Check(**store);
  }

  const ScratchFolder scratch_;
  const std::string folder_ = scratch_.path() + "/spill";
  const std::string journal_ = scratch_.path() + "/journal";
  const std::string log_ = scratch_.path() + "/log";
  CrashModel model_;
};

TEST_F(SpillCrashTest, F7_KilledAtRandomInstantsUnsyncedWritesLost_IndexEqualsReadableData) {
  constexpr int kKills = 60;
  const uint64_t seed = Random::FromEntropy().Next() % 1'000'000;
  std::printf("seed %lu\n", seed);
  Random random(seed);
  PowerLoss total;
  for (int kill = 0; kill < kKills; ++kill) {
    const PowerLoss loss = KillOnce(random, /*lying=*/false);
    total.files_gone += loss.files_gone;
    total.files_cut += loss.files_cut;
    total.renames_undone += loss.renames_undone;
    total.bytes_gone += loss.bytes_gone;
    const std::vector<std::string> wrong = Look();
    ASSERT_TRUE(wrong.empty()) << "kill " << kill << ":\n" << absl::StrJoin(wrong, "\n");
  }
  std::printf(
      "%d kills: %lu changes acknowledged, %lu keys checked, %lu found that were not acknowledged; "
      "lost: "
      "%lu files, %lu ends of files, %lu renames, %lu KiB\n",
      kKills, model_.acknowledged(), model_.checked(), model_.unacknowledged_found(),
      total.files_gone, total.files_cut, total.renames_undone, total.bytes_gone / 1024);
  // The test is of something.
  EXPECT_GT(model_.acknowledged(), 200u);
  EXPECT_GT(total.files_gone + total.files_cut, 10u);
  EXPECT_GT(total.bytes_gone, 1'000'000u);
}

TEST_F(SpillCrashTest, DiskThatLiesAboutSyncing_IsNoticed) {
  const uint64_t seed = Random::FromEntropy().Next() % 1'000'000;
  std::printf("seed %lu\n", seed);
  Random random(seed);
  bool noticed = false;
  for (int kill = 0; kill < 10 && !noticed; ++kill) {
    (void)KillOnce(random, /*lying=*/true);
    noticed = !Look().empty();
  }
  EXPECT_TRUE(noticed) << "the crash test above would not see a lost write";
}

}  // namespace
}  // namespace kvt
