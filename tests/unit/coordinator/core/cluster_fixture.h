// A cluster core with hand-moved time, and builders of what nodes send.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core/cluster.h"

namespace kvt {

inline ModelInfo TestModel(const std::string& name = "smol") {
  ModelInfo model;
  model.name = name;
  model.fingerprint = "f1";
  model.numerics_id = "cpu/test";
  model.geometry = Geometry{.layers = 2, .kv_heads = 1, .head_dim = 32};
  model.context_tokens_max = 1000;
  return model;
}

inline RegisterRequest TestNode(NodeKind kind, const std::string& name, uint64_t epoch = 1) {
  RegisterRequest request;
  request.kind = kind;
  request.name = name;
  request.epoch = BootEpoch(epoch);
  request.control_address = absl::StrCat(name, ":1");
  request.pid = 100 + static_cast<int64_t>(epoch);
  if (kind != NodeKind::kStore) request.model = TestModel();
  request.batch_max = kind == NodeKind::kDecode ? 8 : 0;
  return request;
}

class ClusterFixture : public ::testing::Test {
 protected:
  explicit ClusterFixture(const CoordinatorCoreOptions& options = {})
      : options_(options), cluster_(options_) {
    cluster_.Tick(now_);
  }

  void Join(NodeKind kind, const std::string& name, uint64_t epoch = 1) {
    ASSERT_TRUE(cluster_.Register(now_, TestNode(kind, name, epoch)).ok());
    alive_[name] = epoch;
  }
  // A store, a prefill worker and two decode workers.
  void JoinUsual() {
    Join(NodeKind::kStore, "store-0");
    Join(NodeKind::kPrefill, "prefill-0");
    Join(NodeKind::kDecode, "decode-0");
    Join(NodeKind::kDecode, "decode-1");
  }
  // Moves time in ticks of 100 ms, everyone in alive_ sending heartbeats.
  void Run(absl::Duration duration) {
    for (absl::Duration done; done < duration; done += absl::Milliseconds(100)) {
      now_.monotonic += absl::Milliseconds(100);
      now_.unix += absl::Milliseconds(100);
      for (const auto& [name, epoch] : alive_) {
        cluster_.Heartbeat(now_, Beat(name, epoch));
      }
      cluster_.Tick(now_);
    }
  }
  HeartbeatRequest Beat(const std::string& name, uint64_t epoch = 1) const {
    HeartbeatRequest request{.name = name, .epoch = BootEpoch(epoch), .view_version = 0, .load = {}};
    if (const auto held = held_.find(name); held != held_.end()) request.load.tickets = held->second;
    return request;
  }
  absl::StatusOr<Grant> Admit(uint32_t prompt_tokens = 100, uint32_t output = 10) {
    return cluster_.Admit(now_,
                          AdmitRequest{.model = "smol",
                                       .tenant = "",
                                       .prompt_tokens = prompt_tokens,
                                       .output_tokens_max = output,
                                       .fidelity = Fidelity::kExact},
                          std::string(16, 'c'));
  }
  void Report(const Ticket& ticket, const std::string& node, RequestPhase phase,
              const std::string& error = "") {
    TicketUpdate update;
    update.id = ticket.id;
    update.epoch = ticket.epoch;
    update.node = node;
    update.phase = phase;
    update.error = error;
    cluster_.Update(now_, {update});
  }
  // Admitted, prefilled, placed and decoding.
  Ticket Decoding() {
    const auto grant = Admit();
    EXPECT_TRUE(grant.ok()) << grant.status();
    Report(grant->ticket, grant->ticket.prefill_worker, RequestPhase::kPrefill);
    const auto placed = cluster_.Place(now_, grant->ticket, {});
    EXPECT_TRUE(placed.ok()) << placed.status();
    Report(placed->ticket, placed->ticket.decode_worker, RequestPhase::kDecode);
    return placed->ticket;
  }
  RequestStatus Find(TicketId id) const {
    for (const RequestStatus& request : cluster_.Requests(now_)) {
      if (request.id == id) return request;
    }
    ADD_FAILURE() << "no request " << id;
    return {};
  }
  std::string StateOf(const std::string& node) const {
    for (const NodeStatus& status : cluster_.Status(now_).nodes) {
      if (status.name == node) return status.state;
    }
    return "";
  }
  bool HasEvent(const std::string& part) const {
    for (const ClusterEvent& event : cluster_.Status(now_).events) {
      if (event.text.find(part) != std::string::npos) return true;
    }
    return false;
  }

  CoordinatorCoreOptions options_;
  Moment now_{.monotonic = absl::FromUnixSeconds(1000), .unix = absl::FromUnixSeconds(1'900'000'000)};
  Cluster cluster_;
  std::map<std::string, uint64_t> alive_;
  std::map<std::string, std::vector<TicketRef>> held_;
};

inline bool Contains(const absl::Status& status, const std::string& part) {
  return status.message().find(part) != absl::string_view::npos;
}

}  // namespace kvt
