// Implementations behind a server that keep what they were asked and answer what they were told.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

// Every call returns `failure` when it is not OK.
class RecordingCoordinator final : public CoordinatorApi {
 public:
  absl::StatusOr<RegisterReply> Register(const RegisterRequest& request) override {
    register_request = request;
    if (!failure.ok()) return failure;
    return register_reply;
  }
  absl::StatusOr<HeartbeatReply> Heartbeat(const HeartbeatRequest& request) override {
    heartbeat_request = request;
    if (!failure.ok()) return failure;
    return heartbeat_reply;
  }
  absl::Status Leave(const NodeName& name, BootEpoch epoch) override {
    leave_name = name;
    leave_epoch = epoch;
    return failure;
  }
  absl::StatusOr<AdmitReply> Admit(const AdmitRequest& request) override {
    admit_request = request;
    if (!failure.ok()) return failure;
    return admit_reply;
  }
  absl::StatusOr<PlaceReply> Place(const PlaceRequest& request) override {
    place_request = request;
    if (!failure.ok()) return failure;
    return place_reply;
  }
  absl::StatusOr<RegrantReply> Regrant(const RegrantRequest& request) override {
    regrant_request = request;
    if (!failure.ok()) return failure;
    return regrant_reply;
  }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    cancel_id = id;
    cancel_capability = capability;
    return failure;
  }
  absl::Status Update(const std::vector<TicketUpdate>& updates) override {
    update_request = updates;
    return failure;
  }
  absl::StatusOr<ClusterView> View() override {
    if (!failure.ok()) return failure;
    return view;
  }
  absl::StatusOr<ClusterStatus> Status() override {
    if (!failure.ok()) return failure;
    return status;
  }
  absl::StatusOr<std::vector<RequestStatus>> Requests() override {
    if (!failure.ok()) return failure;
    return requests;
  }
  absl::StatusOr<std::vector<ModelInfo>> Models() override {
    if (!failure.ok()) return failure;
    return models;
  }

  absl::Status failure;
  RegisterRequest register_request;
  RegisterReply register_reply;
  HeartbeatRequest heartbeat_request;
  HeartbeatReply heartbeat_reply;
  NodeName leave_name;
  BootEpoch leave_epoch;
  AdmitRequest admit_request;
  AdmitReply admit_reply;
  PlaceRequest place_request;
  PlaceReply place_reply;
  RegrantRequest regrant_request;
  RegrantReply regrant_reply;
  TicketId cancel_id;
  std::string cancel_capability;
  std::vector<TicketUpdate> update_request;
  ClusterView view;
  ClusterStatus status;
  std::vector<RequestStatus> requests;
  std::vector<ModelInfo> models;
};

class RecordingPrefill final : public PrefillApi {
 public:
  absl::Status Submit(const SubmitRequest& request, const PrefillSink& sink) override {
    submit_request = request;
    for (const PrefillEvent& event : events) {
      if (!sink(event)) return absl::OkStatus();
    }
    if (on_stream) return on_stream(sink);
    return failure;
  }
  absl::Status Resume(const ResumeRequest& request) override {
    resume_request = request;
    return failure;
  }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    cancel_id = id;
    cancel_capability = capability;
    return failure;
  }

  absl::Status failure;
  SubmitRequest submit_request;
  ResumeRequest resume_request;
  TicketId cancel_id;
  std::string cancel_capability;
  std::vector<PrefillEvent> events;
  std::function<absl::Status(const PrefillSink&)> on_stream;
};

class RecordingDecode final : public DecodeApi {
 public:
  absl::Status HandOver(const HandOverRequest& request) override {
    hand_over_request = request;
    return failure;
  }
  absl::Status Attach(const AttachRequest& request, const TokenSink& sink) override {
    attach_request = request;
    for (const TokenEvent& event : events) {
      if (!sink(event)) return absl::OkStatus();
    }
    if (on_stream) return on_stream(sink);
    return failure;
  }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    cancel_id = id;
    cancel_capability = capability;
    return failure;
  }

  absl::Status failure;
  HandOverRequest hand_over_request;
  AttachRequest attach_request;
  TicketId cancel_id;
  std::string cancel_capability;
  std::vector<TokenEvent> events;
  std::function<absl::Status(const TokenSink&)> on_stream;
};

}  // namespace kvt
