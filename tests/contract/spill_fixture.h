// What the SpillStore suite needs of an implementation: a medium that outlives its stores. Records'
// content is a function of the key and a version, so that a foreign byte is seen. Used by one
// thread.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kvstore/media/spill_store.h"

namespace kvt {

class SpillMedium {
 public:
  virtual ~SpillMedium() = default;
  // One store at a time. quota_bytes 0: none.
  virtual absl::StatusOr<std::unique_ptr<SpillStore>> Open(uint64_t quota_bytes) = 0;
  // Changes a byte of the record's value on the medium; no store is open.
  virtual void Damage(const SpillKey& key, const std::string& bytes) = 0;
  // Whether the bytes can be found anywhere on the medium; no store is open.
  virtual bool Contains(const std::string& pattern) = 0;
};

struct SpillMediumKind {
  std::string name;
  std::function<std::unique_ptr<SpillMedium>()> make;
  friend void PrintTo(const SpillMediumKind& kind, std::ostream* out) { *out << kind.name; }
};

// A record's content: 8-byte words that hold key, version and place.
struct SpillSample {
  SpillKey key;
  std::string meta;
  std::string bytes;

  [[nodiscard]] SpillWrite Write() const {
    return {key, meta,
            absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size())};
  }
};

SpillKey SampleKey(uint64_t number, SpillPart part = SpillPart::kBase);
SpillSample Sample(uint64_t number, uint64_t version, size_t bytes,
                   SpillPart part = SpillPart::kBase);

std::vector<SpillWrite> WritesOf(absl::Span<const SpillSample> samples);
// Reads one record into `bytes`, which is made `size` long.
absl::Status ReadOne(SpillStore& store, const SpillKey& key, size_t size, std::string* bytes);
// Reads all in one call; the first that is not OK or not equal, described.
absl::Status ReadAll(SpillStore& store, absl::Span<const SpillSample> samples);

struct SpillScanned {
  SpillKey key;
  std::string meta;
  uint64_t bytes = 0;
};
std::vector<SpillScanned> ScanAll(SpillStore& store);

}  // namespace kvt
