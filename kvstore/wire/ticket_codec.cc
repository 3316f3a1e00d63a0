#include "kvstore/wire/ticket_codec.h"

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr char kMagic[4] = {'K', 'V', 'T', 'T'};
constexpr uint8_t kVersion = 1;

class Writer {
 public:
  template <typename T>
  void Number(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void String(absl::string_view text) {
    KVT_CHECK(text.size() <= kTicketStringBytesMax);
    Number(static_cast<uint16_t>(text.size()));
    bytes_.append(text.data(), text.size());
  }
  void Raw(absl::string_view text) { bytes_.append(text.data(), text.size()); }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads in order; the first failure sticks and later reads give zeros.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T Number(absl::string_view field) {
    if (!Need(sizeof(T), field)) return T{};
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes_[at_ + i])) << (8 * i);
    }
    at_ += sizeof(T);
    return static_cast<T>(value);
  }
  std::string String(absl::string_view field) {
    const uint16_t size = Number<uint16_t>(field);
    if (size > kTicketStringBytesMax) Fail(field, "longer than its bound");
    if (!Need(size, field)) return "";
    std::string text(bytes_.substr(at_, size));
    at_ += size;
    return text;
  }
  template <typename Enum>
  Enum EnumUpTo(Enum last, absl::string_view field) {
    const uint8_t value = Number<uint8_t>(field);
    if (value > static_cast<uint8_t>(last)) Fail(field, "unknown value");
    return static_cast<Enum>(value);
  }
  void Fail(absl::string_view field, absl::string_view why) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("ticket payload: ", field, " at byte ", at_, ": ", why));
  }
  [[nodiscard]] bool ok() const { return status_.ok(); }
  [[nodiscard]] absl::Status Finish() {
    if (at_ != bytes_.size()) Fail("end", "trailing bytes");
    return status_;
  }

 private:
  bool Need(size_t size, absl::string_view field) {
    if (!status_.ok()) return false;
    if (bytes_.size() - at_ < size) {
      Fail(field, "payload ends here");
      return false;
    }
    return true;
  }
  absl::string_view bytes_;
  size_t at_ = 0;
  absl::Status status_;
};

}  // namespace

std::string EncodeTicket(const Ticket& ticket) {
  KVT_CHECK(ticket.stores.size() <= kTicketStoresMax);
  Writer out;
  out.Raw(absl::string_view(kMagic, sizeof kMagic));
  out.Number(kVersion);
  out.Number(ticket.id.value());
  out.Number(ticket.epoch.value());
  out.Number(ticket.prompt_tokens);
  out.Number(ticket.output_tokens_max);
  out.Number(static_cast<uint8_t>(ticket.fidelity));
  out.Number(static_cast<uint8_t>(ticket.request_class));
  out.Number(ticket.present_by_unix_ms);
  for (const std::string* text :
       {&ticket.tenant, &ticket.model, &ticket.model_fingerprint, &ticket.numerics_id,
        &ticket.prefill_worker, &ticket.decode_worker, &ticket.decode_address,
        &ticket.capability}) {
    out.String(*text);
  }
  out.Number(static_cast<uint16_t>(ticket.stores.size()));
  for (const StoreRef& store : ticket.stores) {
    out.String(store.name);
    out.String(store.control_address);
    out.Number(store.epoch.value());
    out.Number(store.weight);
  }
  return out.Take();
}

absl::StatusOr<Ticket> DecodeTicket(absl::string_view payload) {
  if (payload.size() > kTicketPayloadBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("ticket payload: ", payload.size(), " bytes are more than a ticket has"));
  }
  Reader in(payload);
  for (const char expected : kMagic) {
    if (in.Number<char>("magic") != expected) in.Fail("magic", "not a ticket");
  }
  const uint8_t version = in.Number<uint8_t>("version");
  if (version != kVersion) {
    in.Fail("version", absl::StrCat(static_cast<int>(version), " is not one we read"));
  }
  Ticket ticket;
  ticket.id = TicketId(in.Number<uint64_t>("id"));
  ticket.epoch = TicketEpoch(in.Number<uint32_t>("epoch"));
  ticket.prompt_tokens = in.Number<uint32_t>("prompt_tokens");
  ticket.output_tokens_max = in.Number<uint32_t>("output_tokens_max");
  ticket.fidelity = in.EnumUpTo(Fidelity::kSparse, "fidelity");
  ticket.request_class = in.EnumUpTo(RequestClass::kOffloaded, "request_class");
  ticket.present_by_unix_ms = in.Number<int64_t>("present_by_unix_ms");
  ticket.tenant = in.String("tenant");
  ticket.model = in.String("model");
  ticket.model_fingerprint = in.String("model_fingerprint");
  ticket.numerics_id = in.String("numerics_id");
  ticket.prefill_worker = in.String("prefill_worker");
  ticket.decode_worker = in.String("decode_worker");
  ticket.decode_address = in.String("decode_address");
  ticket.capability = in.String("capability");
  const uint16_t stores = in.Number<uint16_t>("store count");
  if (stores > kTicketStoresMax) in.Fail("store count", "beyond its bound");
  for (uint16_t i = 0; i < stores && in.ok(); ++i) {
    StoreRef store;
    store.name = in.String("store name");
    store.control_address = in.String("store address");
    store.epoch = BootEpoch(in.Number<uint64_t>("store epoch"));
    store.weight = in.Number<uint32_t>("store weight");
    ticket.stores.push_back(std::move(store));
  }
  KVT_RETURN_IF_ERROR(in.Finish());
  return ticket;
}

}  // namespace kvt
