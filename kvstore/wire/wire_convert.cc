#include "kvstore/wire/wire_convert.h"

namespace kvt::rpc {

void ToWire(const Geometry& from, kvtide::Geometry* to) {
  to->set_layers(from.layers);
  to->set_kv_heads(from.kv_heads);
  to->set_head_dim(from.head_dim);
  to->set_layout(static_cast<uint32_t>(from.layout));
}

void ToWire(const SignedTicket& from, kvtide::SignedTicket* to) {
  to->set_payload(from.payload);
  to->set_signature(from.signature);
}

void ToWire(const TicketRef& from, kvtide::TicketRef* to) {
  to->set_id(from.id.value());
  to->set_epoch(from.epoch.value());
}

void ToWire(const StoreRef& from, kvtide::StoreRef* to) {
  to->set_name(from.name);
  to->set_epoch(from.epoch.value());
  to->set_control_address(from.control_address);
  to->set_weight(from.weight);
}

void ToWire(const TokenCounts& from, kvtide::TokenCounts* to) {
  to->set_exact(from.exact);
  to->set_base(from.base);
  to->set_sparse(from.sparse);
}

void ToWire(const WireVersionRange& from, kvtide::VersionRange* to) {
  to->set_min(from.min);
  to->set_max(from.max);
}

Geometry FromWire(const kvtide::Geometry& from) {
  Geometry to;
  to.layers = from.layers();
  to.kv_heads = from.kv_heads();
  to.head_dim = from.head_dim();
  to.layout = static_cast<NamedLayout>(from.layout() > 255 ? 0 : from.layout());
  return to;
}

SignedTicket FromWire(const kvtide::SignedTicket& from) {
  return SignedTicket{.payload = from.payload(), .signature = from.signature()};
}

TicketRef FromWire(const kvtide::TicketRef& from) {
  return TicketRef{TicketId(from.id()), TicketEpoch(from.epoch())};
}

StoreRef FromWire(const kvtide::StoreRef& from) {
  return StoreRef{from.name(), BootEpoch(from.epoch()), from.control_address(), from.weight()};
}

TokenCounts FromWire(const kvtide::TokenCounts& from) {
  return TokenCounts{.exact = from.exact(), .base = from.base(), .sparse = from.sparse()};
}

WireVersionRange FromWire(const kvtide::VersionRange& from) {
  return WireVersionRange{.min = from.min(), .max = from.max()};
}

}  // namespace kvt::rpc
