// Between worker_api.h and worker.proto. Private to kvstore/wire's .cc files.
// FromWire fails (InvalidArgument naming the field) on an unknown enum value and on a selection that
// is out of bounds or order.
#pragma once

#include "absl/status/statusor.h"
#include "kvstore/wire/wire_convert.h"
#include "kvstore/wire/worker.pb.h"
#include "kvstore/wire/worker_api.h"

namespace kvt::rpc {

void ToWire(const SubmitRequest& from, kvtide::SubmitRequest* to);
void ToWire(const PrefillEvent& from, kvtide::PrefillEvent* to);
void ToWire(const ResumeRequest& from, kvtide::ResumeRequest* to);
void ToWire(const HandOverRequest& from, kvtide::HandOverRequest* to);
void ToWire(const TokenEvent& from, kvtide::TokenEvent* to);
void ToWire(const AttachRequest& from, kvtide::AttachRequest* to);

SubmitRequest FromWire(const kvtide::SubmitRequest& from);
absl::StatusOr<PrefillEvent> FromWire(const kvtide::PrefillEvent& from);
absl::StatusOr<ResumeRequest> FromWire(const kvtide::ResumeRequest& from);
absl::StatusOr<HandOverRequest> FromWire(const kvtide::HandOverRequest& from);
absl::StatusOr<TokenEvent> FromWire(const kvtide::TokenEvent& from);
AttachRequest FromWire(const kvtide::AttachRequest& from);

}  // namespace kvt::rpc
