#include "coordinator/ctl/generate_report.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/core/request_table.h"
#include "coordinator/ctl/cli.h"
#include "coordinator/ctl/table.h"
#include "kernels/base/units.h"

namespace kvt::ctl {
namespace {

using nlohmann::json;

double Percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

double Ms(absl::Duration d) { return absl::ToDoubleMilliseconds(d); }

json ToJson(const PrefillFigures& figures, const NodeName& worker) {
  return {{"worker", worker},
          {"prompt_tokens", figures.prompt_tokens},
          {"reused_tokens", figures.reused_tokens},
          {"computed_tokens", figures.computed_tokens},
          {"pulled_bytes", figures.pulled_bytes},
          {"pull_bursts", figures.pull_bursts},
          {"disk_blocks", figures.disk_blocks},
          {"disk_bytes", figures.disk_bytes},
          {"declined_tokens", figures.declined_tokens},
          {"declined", figures.declined},
          {"pushed_bytes", figures.pushed_bytes},
          {"push_bursts", figures.push_bursts},
          {"saturated_values", figures.saturated_values},
          {"queued_ms", Ms(figures.queued)},
          {"compute_ms", Ms(figures.compute)},
          {"hand_over_ms", Ms(figures.hand_over)}};
}

json ToJson(const DecodeFigures& figures, const NodeName& worker) {
  return {{"worker", worker},
          {"output_tokens", figures.output_tokens},
          {"pulled_bytes", figures.pulled_bytes},
          {"pull_bursts", figures.pull_bursts},
          {"blocks_pulled", figures.blocks_pulled},
          {"disk_blocks", figures.disk_blocks},
          {"disk_bytes", figures.disk_bytes},
          {"block_bytes", figures.block_bytes},
          {"write_back_bytes", figures.write_back_bytes},
          {"prompt_tokens_computed", figures.prompt_tokens_computed},
          {"recomputed_suffixes", figures.recomputed_suffixes},
          {"computed",
           {{"exact", figures.computed.exact},
            {"base", figures.computed.base},
            {"sparse", figures.computed.sparse}}},
          {"admission_ms", Ms(figures.admission)},
          {"offloaded", figures.offloaded},
          {"sequence_bytes", figures.sequence_bytes},
          {"admission_bytes", figures.admission_bytes},
          {"admission_bytes_pct", Percent(figures.admission_bytes, figures.sequence_bytes)},
          {"digest_bytes", figures.digest_bytes},
          {"selected_blocks", figures.selected_blocks},
          {"hot_misses", figures.hot_misses},
          {"sparse_steps", figures.sparse_steps}};
}

}  // namespace

const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kRunning: return "none";
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kCancelled: return "cancelled";
  }
  return "unknown";
}

std::string FiguresForPeople(const GenerateResult& result) {
  const PrefillFigures& prefill = result.prefill;
  const DecodeFigures& decode = result.decode;
  std::string out = absl::StrFormat(
      "request %s: %d output tokens, ended by %s, %.2f s\n", FormatTicketId(result.id),
      result.tokens.size(), FinishReasonName(result.finish), absl::ToDoubleSeconds(result.total));
  absl::StrAppendFormat(&out, "  time to first token %.1f ms, to second %.1f ms, per token %.2f ms\n",
                        Ms(result.first_token), Ms(result.second_token), Ms(result.PerToken()));
  absl::StrAppendFormat(
      &out, "  prefill on %s: %d prompt tokens, prefix hit %d, computed %d in %.1f ms (%.0f tokens/s)\n",
      result.prefill_worker, prefill.prompt_tokens, prefill.reused_tokens, prefill.computed_tokens,
      Ms(prefill.compute),
      prefill.compute > absl::ZeroDuration()
          ? static_cast<double>(prefill.computed_tokens) / absl::ToDoubleSeconds(prefill.compute)
          : 0.0);
  absl::StrAppendFormat(
      &out, "    pulled %s in %d bursts, pushed %s in %d bursts, queued %.1f ms, hand-over %.1f ms\n",
      FormatBytes(prefill.pulled_bytes), prefill.pull_bursts, FormatBytes(prefill.pushed_bytes),
      prefill.push_bursts, Ms(prefill.queued), Ms(prefill.hand_over));
  if (prefill.disk_blocks > 0 || decode.disk_blocks > 0) {
    absl::StrAppendFormat(&out, "    from disk: prefill %s (%d blocks), decode %s (%d blocks)\n",
                          FormatBytes(prefill.disk_bytes), prefill.disk_blocks,
                          FormatBytes(decode.disk_bytes), decode.disk_blocks);
  }
  if (prefill.declined_tokens > 0) {
    absl::StrAppendFormat(&out, "    computed though stored: %d tokens (%s)\n",
                          prefill.declined_tokens, Printable(prefill.declined));
  }
  absl::StrAppendFormat(
      &out, "  decode on %s: pulled %s in %d bursts (%d blocks), wrote back %s, admitted in %.1f ms\n",
      result.decode_worker, FormatBytes(decode.pulled_bytes), decode.pull_bursts,
      decode.blocks_pulled, FormatBytes(decode.write_back_bytes), Ms(decode.admission));
  absl::StrAppendFormat(&out, "    tokens computed exact %d, BASE %d, sparse %d; suffixes recomputed %d\n",
                        decode.computed.exact, decode.computed.base, decode.computed.sparse,
                        decode.recomputed_suffixes);
  if (decode.offloaded) {
    absl::StrAppendFormat(
        &out, "    offloaded: admitted with %s of %s (%.1f %%), digests %s of it\n",
        FormatBytes(decode.admission_bytes), FormatBytes(decode.sequence_bytes),
        Percent(decode.admission_bytes, decode.sequence_bytes), FormatBytes(decode.digest_bytes));
    absl::StrAppendFormat(&out,
                          "    %d sparse steps chose %d blocks, %d of them (%.1f %%) fetched\n",
                          decode.sparse_steps, decode.selected_blocks, decode.hot_misses,
                          Percent(decode.hot_misses, decode.selected_blocks));
  }
  return out;
}

std::string GenerateJson(const GenerateReport& report) {
  const GenerateResult& result = *report.result;
  json all = {{"id", FormatTicketId(result.id)},
              {"model", std::string(report.model)},
              {"text", std::string(report.text)},
              {"tokens", result.tokens},
              {"finish_reason", FinishReasonName(result.finish)},
              {"prompt_tokens", report.prompt_tokens},
              {"output_tokens", result.tokens.size()},
              {"ttft_ms", Ms(result.first_token)},
              {"second_token_ms", Ms(result.second_token)},
              {"tpot_ms", Ms(result.PerToken())},
              {"total_ms", Ms(result.total)},
              {"prefill", ToJson(result.prefill, result.prefill_worker)},
              {"decode", ToJson(result.decode, result.decode_worker)}};
  if (!report.cancelled_at.empty()) all["cancelled_at"] = report.cancelled_at;
  if (!report.status.ok()) {
    all["error"] = {{"code", CodeName(report.status.code())},
                    {"message", std::string(report.status.message())}};
  }
  return all.dump(2, ' ', false, json::error_handler_t::replace);
}

}  // namespace kvt::ctl
