// Between kvstore/wire/store_api.h and the messages of store.proto. Decoders check what they are
// given: InvalidArgument naming the field. Private to kvstore/wire's .cc files.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/wire/store.pb.h"
#include "kvstore/wire/store_api.h"

namespace kvt::rpc {

void ToWire(const OpenSessionRequest& from, kvtide::OpenSessionRequest* to);
void ToWire(const OpenSessionReply& from, kvtide::OpenSessionReply* to);
void ToWire(const LookupRequest& from, kvtide::LookupRequest* to);
void ToWire(const LookupReply& from, kvtide::LookupReply* to);
void ToWire(const ReserveRequest& from, kvtide::ReserveRequest* to);
void ToWire(const ReserveReply& from, kvtide::ReserveReply* to);
void ToWire(const SealRequest& from, kvtide::SealRequest* to);
void ToWire(const SealReply& from, kvtide::SealReply* to);
void ToWire(const VerifyRequest& from, kvtide::VerifyRequest* to);
void ToWire(const PromoteRequest& from, kvtide::PromoteRequest* to);
void ToWire(const PromoteReply& from, kvtide::PromoteReply* to);
void ToWire(const PurgeTenantRequest& from, kvtide::PurgeTenantRequest* to);
void ToWire(const PurgeTenantReply& from, kvtide::PurgeTenantReply* to);
void ToWire(const ReleaseRequest& from, kvtide::ReleaseRequest* to);
void ToWire(const RenewRequest& from, kvtide::RenewRequest* to);
void ToWire(const StoreStats& from, kvtide::StoreStats* to);

OpenSessionRequest FromWire(const kvtide::OpenSessionRequest& from);
absl::StatusOr<OpenSessionReply> FromWire(const kvtide::OpenSessionReply& from);
absl::StatusOr<LookupRequest> FromWire(const kvtide::LookupRequest& from);
absl::StatusOr<LookupReply> FromWire(const kvtide::LookupReply& from);
absl::StatusOr<ReserveRequest> FromWire(const kvtide::ReserveRequest& from);
absl::StatusOr<ReserveReply> FromWire(const kvtide::ReserveReply& from);
absl::StatusOr<SealRequest> FromWire(const kvtide::SealRequest& from);
absl::StatusOr<SealReply> FromWire(const kvtide::SealReply& from);
absl::StatusOr<VerifyRequest> FromWire(const kvtide::VerifyRequest& from);
absl::StatusOr<PromoteRequest> FromWire(const kvtide::PromoteRequest& from);
absl::StatusOr<PromoteReply> FromWire(const kvtide::PromoteReply& from);
PurgeTenantRequest FromWire(const kvtide::PurgeTenantRequest& from);
absl::StatusOr<PurgeTenantReply> FromWire(const kvtide::PurgeTenantReply& from);
ReleaseRequest FromWire(const kvtide::ReleaseRequest& from);
absl::StatusOr<RenewRequest> FromWire(const kvtide::RenewRequest& from);
absl::StatusOr<StoreStats> FromWire(const kvtide::StoreStats& from);

}  // namespace kvt::rpc
