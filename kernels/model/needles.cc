#include "kernels/model/needles.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/model/digest_selector.h"
#include "kernels/model/model_config.h"
#include "kernels/model/text_run.h"
#include "kernels/select/attention_stats.h"
#include "kernels/select/layer_budgets.h"

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

absl::StatusOr<NeedlesFound> FindNeedles(const Transformer& transformer,
                                         const Calibration& calibration, const NeedleText& text,
                                         int budget_tokens) {
  const int first = static_cast<int>(text.prefix.size());
  const auto vocab = static_cast<ptrdiff_t>(transformer.config().vocab);
  KVT_ASSIGN_OR_RETURN(const auto run, TextRun::Create(transformer, first + kSparseRowsMax));
  KVT_RETURN_IF_ERROR(run->Prefill(text.prefix, 0, nullptr));
  std::vector<std::vector<CalibrationHead>> layers;
  for (const CalibrationLayer& layer : calibration.layers) layers.push_back(layer.heads);
  KVT_ASSIGN_OR_RETURN(const auto digests,
                       DigestSelector::Create(*run, calibration.bits, std::move(layers)));
  for (int layer = 0; layer < transformer.geometry().layers; ++layer) {
    KVT_RETURN_IF_ERROR(digests->MakeDigests(layer, 0, first / kBlockTokens));
  }
  const std::vector<int> budgets =
      LayerBudgets(calibration, budget_tokens, MiddleOf(first + kSparseRowsMax - 1).count());
  NeedlesFound found;
  for (const NeedleQuestion& question : text.questions) {
    ++found.planted;
    const auto rows = static_cast<ptrdiff_t>(question.tokens.size()) - 1;
    for (int* const counted : {&found.full, &found.sparse}) {
      absl::Status failed;
      const TextRun::Selector select = [&](int layer, int position, const LayerActivations& a) {
        if (counted == &found.full || digests->dense(layer)) return RowSelections::Full();
        std::vector<int> positions;
        for (int r = 0; r < a.rows; ++r) positions.push_back(position + r);
        auto blocks = digests->Select(layer, positions, a.qkv, a.qkv_stride,
                                      budgets[static_cast<size_t>(layer)]);
        if (!blocks.ok()) {
          failed.Update(blocks.status());
          return RowSelections::Full();
        }
        return RowSelections{false, false, std::move(*blocks)};
      };
      KVT_ASSIGN_OR_RETURN(
          const std::vector<float> logits,
          run->Decode(absl::MakeConstSpan(question.tokens).first(static_cast<size_t>(rows)), first,
                      select));
      KVT_RETURN_IF_ERROR(failed);
      bool all = true;
      for (ptrdiff_t i = rows - question.answer; i < rows; ++i) {
        const auto row = logits.begin() + i * vocab;
        const auto best = std::max_element(row, row + vocab) - row;
        all = all && best == question.tokens[static_cast<size_t>(i) + 1];
      }
      *counted += all;
    }
  }
  return found;
}

}  // namespace kvt
