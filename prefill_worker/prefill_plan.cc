#include "prefill_worker/prefill_plan.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {

PrefillPlan::PrefillPlan(int tokens) : tokens_(tokens) {
  KVT_CHECK(tokens > 0 && tokens <= kSequenceTokensMax, "tokens=", tokens);
  present_.resize(static_cast<size_t>((tokens + kBlockTokens - 1) / kBlockTokens), false);
}

void PrefillPlan::SetPresent(int block, bool present) {
  KVT_CHECK(!started_);
  KVT_CHECK(block >= 0 && block < reusable_blocks(), "block=", block, " tokens=", tokens_);
  present_[static_cast<size_t>(block)] = present;
}

std::vector<int> PrefillPlan::MissingBlocks() const {
  std::vector<int> missing;
  for (int block = 0; block < blocks(); ++block) {
    if (!IsPresent(block)) missing.push_back(block);
  }
  return missing;
}

std::vector<TokenRange> PrefillPlan::MissingRanges() const {
  std::vector<TokenRange> ranges;
  for (const int block : MissingBlocks()) {
    const int begin = block * kBlockTokens;
    const int end = std::min(begin + kBlockTokens, tokens_);
    if (!ranges.empty() && ranges.back().end == begin) {
      ranges.back().end = end;
    } else {
      ranges.push_back({begin, end});
    }
  }
  return ranges;
}

int PrefillPlan::computed_tokens_total() const {
  int sum = 0;
  for (const TokenRange& range : MissingRanges()) sum += range.size();
  return sum;
}

int PrefillPlan::remaining_tokens() const {
  int sum = 0;
  for (const TokenRange& range : MissingRanges()) {
    sum += std::max(0, range.end - std::max(range.begin, next_));
  }
  return sum;
}

std::optional<TokenRange> PrefillPlan::TakeChunk(int tokens_max) {
  started_ = true;
  SkipPresent();
  if (AllTaken()) return std::nullopt;
  int end = next_;
  while (end < tokens_ && !IsPresent(end / kBlockTokens)) {
    end = std::min(end + kBlockTokens, tokens_);
  }
  if (end - next_ > tokens_max) {
    end = next_ + tokens_max / kBlockTokens * kBlockTokens;
    if (end == next_) return std::nullopt;
  }
  const TokenRange chunk{next_, end};
  next_ = end;
  SkipPresent();
  return chunk;
}

void PrefillPlan::SkipPresent() {
  while (next_ < tokens_ && IsPresent(next_ / kBlockTokens)) next_ += kBlockTokens;
}

}  // namespace kvt
