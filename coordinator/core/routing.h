// Which worker takes a request: the least loaded one that serves its model. Pure.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/request_table.h"

namespace kvt {

// Least prompt tokens granted and not handed over; then fewest tickets; then the name.
// FailedPrecondition naming the dead or draining ones when none is ready.
absl::StatusOr<const Member*> PickPrefill(const Membership& nodes, const RequestTable& requests,
                                          absl::string_view model);

// Fewest tickets relative to its batch, `refused` left out. FailedPrecondition as above;
// ResourceExhausted (retryable) when each ready one refused.
absl::StatusOr<const Member*> PickDecode(const Membership& nodes, const RequestTable& requests,
                                         absl::string_view model,
                                         const std::vector<NodeName>& refused);

// InvalidArgument when no decode worker for the model that is alive could hold the KV of so many
// tokens, however empty: both sizes and the largest worker are named. Waiting would not help.
absl::Status CheckFitsSomeDecode(const Membership& nodes, const ModelInfo& model, uint64_t tokens);

}  // namespace kvt
