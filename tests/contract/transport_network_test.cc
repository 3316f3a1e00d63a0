// A network that is cut in the middle of bursts (F2): the store lives in a network namespace of its
// own, behind a veth pair that the test takes down and up. Needs root.
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/contract/transport_fixture.h"
#include "tests/support/run_program.h"

namespace kvt {
namespace {

constexpr char kIp[] = "/usr/sbin/ip";

// A namespace with one end of a veth pair; the other end is here.
class Namespace {
 public:
  Namespace()
      : name_(absl::StrCat("kvt", getpid())),
        here_(absl::StrCat(name_, "a")),
        there_(absl::StrCat(name_, "b")),
        net_(absl::StrCat("10.213.", getpid() % 250)) {
    const std::vector<std::vector<std::string>> steps = {
        {"netns", "add", name_},
        {"link", "add", here_, "type", "veth", "peer", "name", there_},
        {"link", "set", there_, "netns", name_},
        {"addr", "add", absl::StrCat(net_, ".1/30"), "dev", here_},
        {"link", "set", here_, "up"},
        {"-n", name_, "addr", "add", absl::StrCat(net_, ".2/30"), "dev", there_},
        {"-n", name_, "link", "set", there_, "up"},
        {"-n", name_, "link", "set", "lo", "up"}};
    for (const auto& step : steps) {
      if (problem_.empty()) problem_ = Run(step);
    }
  }
  ~Namespace() {
    (void)Run({"link", "del", here_});
    (void)Run({"netns", "del", name_});
  }
  // Why there is none; empty when there is.
  [[nodiscard]] const std::string& problem() const { return problem_; }
  [[nodiscard]] const std::string& here() const { return here_; }
  [[nodiscard]] const std::string& there() const { return there_; }
  [[nodiscard]] std::string address() const { return absl::StrCat(net_, ".2"); }
  [[nodiscard]] std::vector<std::string> Exec() const { return {kIp, "netns", "exec", name_}; }
  void Cut() { EXPECT_EQ(Run({"link", "set", here_, "down"}), ""); }
  void Mend() { EXPECT_EQ(Run({"link", "set", here_, "up"}), ""); }

 private:
  static std::string Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), kIp);
    const ProgramResult result = RunProgram(arguments, "", absl::Seconds(10));
    return result.code == 0 ? "" : absl::StrCat("ip ", arguments[1], ": ", result.err);
  }
  const std::string name_, here_, there_, net_;
  std::string problem_;
};

TEST(UcxNetwork, F2_CutInTheMiddleOfBursts_EveryBurstEndsByItsDeadlineAndOtherPeersGoOn) {
  if (geteuid() != 0) GTEST_SKIP() << "network namespaces need root";
  if (access(kIp, X_OK) != 0) GTEST_SKIP() << kIp << " is missing (iproute2)";
  Namespace network;
  if (!network.problem().empty()) GTEST_SKIP() << network.problem();
  std::string address;
  Child store({"--serve-at", network.address(), network.there(), "32"}, &address, network.Exec());
  auto transport = MakeUcxTransportOver(absl::StrCat(network.here(), ",lo"));
  auto far = transport->Connect(address, TestToken(), In(kPatience));
  ASSERT_TRUE(far.ok()) << far.status();
  auto resolver = MakeResolver(8);
  std::vector<uint64_t> handles;
  for (uint32_t i = 0; i < 8; ++i) handles.push_back(resolver->Seal(i));
  auto server = StartServer(Backend::kUcx, *resolver);
  auto near = transport->Connect(server->Address(), TestToken(), In(kPatience));
  ASSERT_TRUE(near.ok()) << near.status();

  constexpr absl::Duration kAllowed = absl::Seconds(3);
  std::vector<std::unique_ptr<TestBurst>> bursts;
  for (int b = 0; b < 6; ++b) {
    bursts.push_back(std::make_unique<TestBurst>(128, 30, kSlot));
    for (uint32_t i = 0; i < 128; ++i) {
      bursts.back()->SetPiece(i, MakeRecordHandle(i % 32, 1), 0);
      if (b % 2 == 1) bursts.back()->FillSources(i, i % 32, 1);
    }
  }
  const absl::Time start = RealClock::Get().Now();
  for (int b = 0; b < 6; ++b) {
    ASSERT_TRUE((b % 2 == 1 ? bursts[b]->Push(**far, In(kAllowed), PushChecksums::kNone)
                            : bursts[b]->Pull(**far, In(kAllowed)))
                    .ok());
  }
  network.Cut();
  int served = 0;
  while (!bursts.back()->done() && RealClock::Get().Now() - start < kPatience) {
    TestBurst burst(8, 30, kSlot);
    for (uint32_t i = 0; i < 8; ++i) burst.SetPiece(i, handles[i], 0);
    ASSERT_TRUE(burst.Pull(**near, In(kPatience)).ok());
    ASSERT_EQ(burst.Await().pieces_ok, 8u);
    ++served;
  }
  int cut = 0;
  for (const auto& burst : bursts) {
    const absl::Status status = burst->Await().status;
    EXPECT_TRUE(status.ok() || absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status))
        << status;
    cut += !status.ok();
  }
  EXPECT_LT(RealClock::Get().Now() - start, kAllowed + absl::Seconds(10));
  EXPECT_GT(cut, 0);
  EXPECT_GT(served, 0);
  EXPECT_FALSE((*far)->IsOpen());
  EXPECT_TRUE((*near)->IsOpen());
  // Nobody answers over a network that is cut, and soon again when it is mended.
  auto nobody = transport->Connect(address, TestToken(), In(absl::Milliseconds(300)));
  EXPECT_FALSE(nobody.ok());
  network.Mend();
  absl::Status back = absl::UnavailableError("");
  const absl::Time end = In(kPatience);
  while (!back.ok() && RealClock::Get().Now() < end) {
    far = transport->Connect(address, TestToken(), In(absl::Seconds(2)));
    back = far.status();
  }
  ASSERT_TRUE(back.ok()) << back;
  TestBurst again(32, 30, kSlot);
  for (uint32_t i = 0; i < 32; ++i) again.SetPiece(i, MakeRecordHandle(i, 1), 0);
  ASSERT_TRUE(again.Pull(**far, In(kPatience)).ok());
  EXPECT_EQ(again.Await().pieces_ok, 32u);
  far->reset();
  near->reset();
}

}  // namespace
}  // namespace kvt
