#include "tests/contract/spill_fixture.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/random.h"

namespace kvt {

SpillKey SampleKey(uint64_t number, SpillPart part) {
  SpillKey key;
  const uint64_t words[2] = {Mix64(number + 1), number};
  std::memcpy(key.block.data(), words, sizeof words);
  key.part = part;
  return key;
}

SpillSample Sample(uint64_t number, uint64_t version, size_t bytes, SpillPart part) {
  SpillSample sample;
  sample.key = SampleKey(number, part);
  sample.meta =
      absl::StrCat("meta ", number, " part ", static_cast<int>(part), " v", version, " ", bytes);
  sample.bytes.resize(bytes);
  const uint64_t seed = Mix64(number * 4 + static_cast<uint64_t>(part)) ^ Mix64(version + 77);
  for (size_t at = 0; at < bytes; at += 8) {
    const uint64_t word = Mix64(seed + at);
    std::memcpy(sample.bytes.data() + at, &word, std::min<size_t>(8, bytes - at));
  }
  return sample;
}

std::vector<SpillWrite> WritesOf(absl::Span<const SpillSample> samples) {
  std::vector<SpillWrite> writes;
  writes.reserve(samples.size());
  for (const SpillSample& sample : samples) writes.push_back(sample.Write());
  return writes;
}

absl::Status ReadOne(SpillStore& store, const SpillKey& key, size_t size, std::string* bytes) {
  bytes->assign(size, '\0');
  const SpillRead read{key, absl::MakeSpan(reinterpret_cast<std::byte*>(bytes->data()), size)};
  absl::Status status = absl::UnknownError("not set");
  store.Read({&read, 1}, {&status, 1});
  return status;
}

absl::Status ReadAll(SpillStore& store, absl::Span<const SpillSample> samples) {
  std::vector<std::string> buffers(samples.size());
  std::vector<SpillRead> reads(samples.size());
  std::vector<absl::Status> statuses(samples.size(), absl::UnknownError("not set"));
  for (size_t i = 0; i < samples.size(); ++i) {
    buffers[i].assign(samples[i].bytes.size(), '\0');
    reads[i] = {samples[i].key,
                absl::MakeSpan(reinterpret_cast<std::byte*>(buffers[i].data()), buffers[i].size())};
  }
  store.Read(reads, absl::MakeSpan(statuses));
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!statuses[i].ok()) {
      return absl::Status(statuses[i].code(),
                          absl::StrCat("record ", i, ": ", statuses[i].message()));
    }
    if (buffers[i] != samples[i].bytes)
      return absl::InternalError(absl::StrCat("record ", i, ": foreign bytes"));
  }
  return absl::OkStatus();
}

std::vector<SpillScanned> ScanAll(SpillStore& store) {
  std::vector<SpillScanned> all;
  const absl::Status status =
      store.Scan([&](const SpillKey& key, absl::string_view meta, uint64_t bytes) {
        all.push_back({key, std::string(meta), bytes});
        return true;
      });
  EXPECT_TRUE(status.ok()) << status;
  return all;
}

}  // namespace kvt
