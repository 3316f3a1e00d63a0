#include "tests/bench/quality_needles.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

constexpr const char* kCities[] = {"Lisbon", "Nairobi", "Oslo",  "Quito",  "Hanoi",  "Tunis",
                                   "Lima",   "Dublin",  "Cairo", "Madrid", "Vienna", "Warsaw",
                                   "Athens", "Seoul",   "Delhi", "Ottawa", "Havana", "Prague",
                                   "Rome",   "Tokyo",   "Kyiv",  "Bogota", "Accra",  "Riga"};

std::vector<int32_t> Encode(const Tokenizer& tokenizer, const std::string& text) {
  auto ids = tokenizer.Encode(text, SpecialTokens::kAsText);
  KVT_CHECK(ids.ok(), ids.status().ToString());
  return std::move(ids).value();
}

}  // namespace

NeedleText PlantNeedles(const Tokenizer& tokenizer, const std::vector<int32_t>& haystack, int tokens,
                        int count, double depth, uint64_t seed) {
  Random random(seed);
  std::vector<Needle> needles;
  const size_t first = random.Below(std::size(kCities));
  for (int i = 0; i < count; ++i) {
    needles.push_back({kCities[(first + static_cast<size_t>(i)) % std::size(kCities)],
                       absl::StrCat(10000 + random.Below(90000))});
  }
  std::vector<std::vector<int32_t>> sentences;
  size_t planted = 0;
  for (const Needle& needle : needles) {
    sentences.push_back(Encode(tokenizer, absl::StrCat("\nThe secret number of ", needle.city, " is ",
                                                       needle.number, ".\n")));
    planted += sentences.back().size();
  }
  const size_t hay = static_cast<size_t>(tokens) - planted;
  KVT_CHECK(haystack.size() >= hay, "haystack=", haystack.size());
  NeedleText text;
  size_t used = 0;
  for (int i = 0; i < count; ++i) {
    const double at = count == 1 ? depth : (i + 0.5) / count;
    const auto until = static_cast<size_t>(at * static_cast<double>(hay));
    text.prefix.insert(text.prefix.end(), haystack.begin() + static_cast<ptrdiff_t>(used),
                       haystack.begin() + static_cast<ptrdiff_t>(until));
    used = until;
    const std::vector<int32_t>& sentence = sentences[static_cast<size_t>(i)];
    text.prefix.insert(text.prefix.end(), sentence.begin(), sentence.end());
  }
  text.prefix.insert(text.prefix.end(), haystack.begin() + static_cast<ptrdiff_t>(used),
                     haystack.begin() + static_cast<ptrdiff_t>(hay));
  for (const Needle& needle : needles) {
    NeedleQuestion question;
    question.tokens = Encode(tokenizer, absl::StrCat("\n\nQuestion: What is the secret number of ",
                                                     needle.city, "?\nAnswer: The secret number of ",
                                                     needle.city, " is"));
    const std::vector<int32_t> answer = Encode(tokenizer, absl::StrCat(" ", needle.number));
    question.tokens.insert(question.tokens.end(), answer.begin(), answer.end());
    question.answer = static_cast<int>(answer.size());
    text.questions.push_back(std::move(question));
  }
  return text;
}

}  // namespace kvt
