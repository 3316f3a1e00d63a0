// Between coordinator_api.h and coordinator.proto. Private to kvstore/wire's .cc files.
// FromWire of a request or reply fails (InvalidArgument) on an unknown enum value only.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/wire/coordinator.pb.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/wire_convert.h"

namespace kvt::rpc {

void ToWire(const ModelInfo& from, kvtide::ModelInfo* to);
void ToWire(const RegisterRequest& from, kvtide::RegisterRequest* to);
void ToWire(const RegisterReply& from, kvtide::RegisterReply* to);
void ToWire(const ClusterView& from, kvtide::ClusterView* to);
void ToWire(const LoadReport& from, kvtide::LoadReport* to);
void ToWire(const HeartbeatRequest& from, kvtide::HeartbeatRequest* to);
void ToWire(const HeartbeatReply& from, kvtide::HeartbeatReply* to);
void ToWire(const AdmitRequest& from, kvtide::AdmitRequest* to);
void ToWire(const AdmitReply& from, kvtide::AdmitReply* to);
void ToWire(const PlaceRequest& from, kvtide::PlaceRequest* to);
void ToWire(const PlaceReply& from, kvtide::PlaceReply* to);
void ToWire(const RegrantRequest& from, kvtide::RegrantRequest* to);
void ToWire(const RegrantReply& from, kvtide::RegrantReply* to);
void ToWire(const TicketUpdate& from, kvtide::TicketUpdate* to);
void ToWire(const ClusterStatus& from, kvtide::ClusterStatus* to);
void ToWire(const RequestStatus& from, kvtide::RequestStatus* to);

ModelInfo FromWire(const kvtide::ModelInfo& from);
absl::StatusOr<RegisterRequest> FromWire(const kvtide::RegisterRequest& from);
RegisterReply FromWire(const kvtide::RegisterReply& from);
ClusterView FromWire(const kvtide::ClusterView& from);
LoadReport FromWire(const kvtide::LoadReport& from);
HeartbeatRequest FromWire(const kvtide::HeartbeatRequest& from);
HeartbeatReply FromWire(const kvtide::HeartbeatReply& from);
absl::StatusOr<AdmitRequest> FromWire(const kvtide::AdmitRequest& from);
AdmitReply FromWire(const kvtide::AdmitReply& from);
PlaceRequest FromWire(const kvtide::PlaceRequest& from);
PlaceReply FromWire(const kvtide::PlaceReply& from);
RegrantRequest FromWire(const kvtide::RegrantRequest& from);
RegrantReply FromWire(const kvtide::RegrantReply& from);
absl::StatusOr<TicketUpdate> FromWire(const kvtide::TicketUpdate& from);
absl::StatusOr<ClusterStatus> FromWire(const kvtide::ClusterStatus& from);
absl::StatusOr<RequestStatus> FromWire(const kvtide::RequestStatus& from);

}  // namespace kvt::rpc
