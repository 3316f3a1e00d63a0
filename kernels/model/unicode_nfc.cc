#include "kernels/model/unicode_nfc.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace kvt {
namespace {

struct ClassRange {
  uint32_t first, last;
  uint8_t combining_class;
};
struct Pair {
  uint32_t composed, first, second;
  uint8_t composes;
};
struct Single {
  uint32_t code_point, replacement;
};
#include "kernels/model/unicode_nfc_table.inc"

// The lead byte of U+0300, the first character that is not inert.
constexpr uint8_t kFirstLead = 0xCC;
// Kinds of a character: the combining class of marks (1 to 240); of class 0, those that change or
// may join with what stands before them, and the others.
constexpr uint8_t kInert = 0, kActive = 255;

// Hangul (Unicode 3.12): syllable = kSyllableFirst + (lead * kVowels + vowel) * kTrails + trail.
constexpr uint32_t kSyllableFirst = 0xAC00, kLeadFirst = 0x1100, kVowelFirst = 0x1161,
                   kTrailFirst = 0x11A7;  // trail 0 is none
constexpr uint32_t kLeads = 19, kVowels = 21, kTrails = 28, kSyllables = kLeads * kVowels * kTrails;

struct Tables {
  std::vector<uint8_t> kinds = std::vector<uint8_t>(kTableEnd, kInert);
  struct Parts {
    uint32_t first, second;  // second: 0 for none
  };
  absl::flat_hash_map<uint32_t, Parts> parts;
  absl::flat_hash_map<uint64_t, uint32_t> composed;

  static uint64_t Key(uint32_t first, uint32_t second) { return uint64_t{first} << 32 | second; }

  Tables() {
    for (const Pair& pair : kPairs) {
      parts[pair.composed] = {pair.first, pair.second};
      if (pair.composes == 0) {
        kinds[pair.composed] = kActive;
        continue;
      }
      composed[Key(pair.first, pair.second)] = pair.composed;
      kinds[pair.second] = kActive;
    }
    for (const Single& single : kSingles) {
      parts[single.code_point] = {single.replacement, 0};
      kinds[single.code_point] = kActive;
    }
    for (uint32_t i = 0; i < kVowels; ++i) kinds[kVowelFirst + i] = kActive;
    for (uint32_t i = 1; i < kTrails; ++i) kinds[kTrailFirst + i] = kActive;
    for (const ClassRange& range : kClassRanges) {
      std::fill(kinds.begin() + range.first, kinds.begin() + range.last + 1, range.combining_class);
    }
  }
  uint8_t Kind(uint32_t code_point) const {
    return code_point < kTableEnd ? kinds[code_point] : kInert;
  }
  uint8_t CombiningClass(uint32_t code_point) const {
    const uint8_t kind = Kind(code_point);
    return kind == kActive ? 0 : kind;
  }
};

const Tables& TheTables() {
  static const Tables* const tables = new Tables;
  return *tables;
}

// The character at the start of `at`, of which `bytes` are its own.
uint32_t CodePointAt(const char* at, size_t& bytes) {
  const auto byte = [at](int i) { return uint32_t{static_cast<uint8_t>(at[i])}; };
  const uint32_t lead = byte(0);
  bytes = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  switch (bytes) {
    case 1:
      return lead;
    case 2:
      return (lead & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    default:
      return (lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 |
             (byte(3) & 0x3F);
  }
}

void AppendCodePoint(uint32_t code_point, std::string& out) {
  const auto tail = [&](int shift) {
    out += static_cast<char>(0x80 | ((code_point >> shift) & 0x3F));
  };
  if (code_point < 0x80) {
    out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    out += static_cast<char>(0xC0 | code_point >> 6);
    tail(0);
  } else if (code_point < 0x10000) {
    out += static_cast<char>(0xE0 | code_point >> 12);
    tail(6);
    tail(0);
  } else {
    out += static_cast<char>(0xF0 | code_point >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

// Whether all eight bytes are below kFirstLead: adding 0x80 - 0x4C to the low seven bits carries
// into the top bit for 0x4C and above, which counts where the top bit was set.
bool AllBelowFirstLead(const char* at) {
  uint64_t eight;
  std::memcpy(&eight, at, 8);
  constexpr uint64_t kOnes = 0x0101010101010101ull;
  const uint64_t carried = (eight & kOnes * 0x7F) + kOnes * (0x80 - (kFirstLead & 0x7F));
  return (carried & eight & kOnes * 0x80) == 0;
}

// The first character at or after `at` that is inert, or is not; text.size() when there is none.
size_t SkipInert(const Tables& tables, absl::string_view text, size_t at) {
  while (at < text.size()) {
    if (at + 8 <= text.size() && AllBelowFirstLead(text.data() + at)) {
      at += 8;  // may end within a character, of which continuation bytes are left
      continue;
    }
    if (static_cast<uint8_t>(text[at]) < kFirstLead) {
      ++at;
      continue;
    }
    size_t bytes;
    if (tables.Kind(CodePointAt(text.data() + at, bytes)) != kInert) return at;
    at += bytes;
  }
  return at;
}

// One run between two inert characters, the first of them included.
class Run {
 public:
  explicit Run(const Tables& tables) : tables_(tables) {}

  void Add(uint32_t code_point) {
    const uint32_t syllable = code_point - kSyllableFirst;
    if (syllable < kSyllables) {
      Push(kLeadFirst + syllable / (kVowels * kTrails));
      Push(kVowelFirst + syllable / kTrails % kVowels);
      if (syllable % kTrails != 0) Push(kTrailFirst + syllable % kTrails);
      return;
    }
    const auto it = code_point < 0x80 ? tables_.parts.end() : tables_.parts.find(code_point);
    if (it == tables_.parts.end()) return Push(code_point);
    Add(it->second.first);
    if (it->second.second != 0) Add(it->second.second);
  }

  // Appends the run in NFC and starts anew.
  void Finish(std::string& out) {
    Order();
    Compose();
    for (const Character& character : characters_) AppendCodePoint(character.code_point, out);
    characters_.clear();
  }

 private:
  struct Character {
    uint32_t code_point;
    int combining_class;
  };
  static bool ByClass(const Character& a, const Character& b) {
    return a.combining_class < b.combining_class;
  }

  void Push(uint32_t code_point) {
    characters_.push_back({code_point, tables_.CombiningClass(code_point)});
  }

  // Sorts each stretch of marks by class; marks of one class keep their order.
  void Order() {
    for (auto begin = characters_.begin(); begin != characters_.end();) {
      if (begin->combining_class == 0) {
        ++begin;
        continue;
      }
      const auto end = std::find_if(begin, characters_.end(),
                                    [](const Character& c) { return c.combining_class == 0; });
      if (!std::is_sorted(begin, end, ByClass)) std::stable_sort(begin, end, ByClass);
      begin = end;
    }
  }

  // A character joins the last one of class 0 unless another between them has its class or a higher
  // one, or is of class 0 itself.
  void Compose() {
    size_t kept = 0, starter = 0;
    bool has_starter = false;
    int last_class = -1;  // of the last character kept after the starter; -1: none
    for (const Character character : characters_) {
      if (has_starter && last_class < character.combining_class) {
        const uint32_t joined = Join(characters_[starter].code_point, character.code_point);
        if (joined != 0) {
          characters_[starter].code_point = joined;
          continue;
        }
      }
      if (character.combining_class == 0) {
        has_starter = true;
        starter = kept;
        last_class = -1;
      } else {
        last_class = character.combining_class;
      }
      characters_[kept++] = character;
    }
    characters_.resize(kept);
  }

  // The character that the two make, or 0.
  uint32_t Join(uint32_t first, uint32_t second) const {
    const uint32_t lead = first - kLeadFirst, vowel = second - kVowelFirst;
    if (lead < kLeads && vowel < kVowels) {
      return kSyllableFirst + (lead * kVowels + vowel) * kTrails;
    }
    const uint32_t syllable = first - kSyllableFirst, trail = second - kTrailFirst;
    if (syllable < kSyllables && syllable % kTrails == 0 && trail - 1 < kTrails - 1) {
      return first + trail;
    }
    const auto it = tables_.composed.find(Tables::Key(first, second));
    return it == tables_.composed.end() ? 0 : it->second;
  }

  const Tables& tables_;
  std::vector<Character> characters_;
};

}  // namespace

absl::string_view ToNfc(absl::string_view text, std::string& room) {
  const Tables& tables = TheTables();
  size_t at = SkipInert(tables, text, 0);
  if (at == text.size()) return text;
  room.clear();
  room.reserve(text.size());
  Run run(tables);
  size_t copied = 0;
  while (at < text.size()) {
    size_t begin = at;  // of the inert character before it, which it may join
    if (begin > copied) {
      do --begin;
      while ((static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80);
    }
    room.append(text.data() + copied, begin - copied);
    size_t end = begin;
    while (end < text.size()) {
      size_t bytes;
      const uint32_t code_point = CodePointAt(text.data() + end, bytes);
      if (end > at && tables.Kind(code_point) == kInert) break;
      run.Add(code_point);
      end += bytes;
    }
    run.Finish(room);
    copied = end;
    at = SkipInert(tables, text, end);
  }
  room.append(text.data() + copied, text.size() - copied);
  return room;
}

absl::string_view NfcUnicodeVersion() { return kUnicodeVersion; }

}  // namespace kvt
