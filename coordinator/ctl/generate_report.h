// The figures of one finished request, for people and as JSON.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "coordinator/ctl/generate_session.h"

namespace kvt::ctl {

const char* FinishReasonName(FinishReason reason);

// A few lines; durations in ms.
std::string FiguresForPeople(const GenerateResult& result);

struct GenerateReport {
  const GenerateResult* result = nullptr;
  absl::string_view model;
  absl::string_view text;
  size_t prompt_tokens = 0;
  absl::Status status;       // not OK: "error" stands in the object
  std::string cancelled_at;  // after Ctrl-C
};
// One JSON object.
std::string GenerateJson(const GenerateReport& report);

}  // namespace kvt::ctl
