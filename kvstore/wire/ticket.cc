#include "kvstore/wire/ticket.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/wire/ticket_codec.h"

namespace kvt {
namespace {

// What is signed: the payload behind a prefix, so that a signature of ours means a ticket only.
constexpr char kDomain[] = "kvtide ticket\n";
constexpr size_t kPublicKeyBytes = 32;
constexpr size_t kSignatureBytes = 64;

struct FreeKey {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Key = std::unique_ptr<EVP_PKEY, FreeKey>;

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_MD_CTX, FreeContext>;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

std::string Signed(absl::string_view payload) { return absl::StrCat(kDomain, payload); }

const unsigned char* Bytes(absl::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

class Signer final : public TicketSigner {
 public:
  explicit Signer(Key key) : key_(std::move(key)) {}

  SignedTicket Sign(const Ticket& ticket) const override {
    SignedTicket out{.payload = EncodeTicket(ticket), .signature = std::string(kSignatureBytes, 0)};
    const std::string text = Signed(out.payload);
    Context context(EVP_MD_CTX_new());
    size_t size = kSignatureBytes;
    KVT_CHECK(context != nullptr);
    KVT_CHECK(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1);
    KVT_CHECK(EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(out.signature.data()),
                             &size, Bytes(text), text.size()) == 1);
    KVT_CHECK(size == kSignatureBytes);
    return out;
  }

  std::string PublicKey() const override {
    std::string raw(kPublicKeyBytes, 0);
    size_t size = raw.size();
    KVT_CHECK(EVP_PKEY_get_raw_public_key(
                  key_.get(), reinterpret_cast<unsigned char*>(raw.data()), &size) == 1);
    KVT_CHECK(size == kPublicKeyBytes);
    return raw;
  }

 private:
  const Key key_;
};

class Verifier final : public TicketVerifier {
 public:
  explicit Verifier(Key key) : key_(std::move(key)) {}

  absl::StatusOr<Ticket> Verify(const SignedTicket& ticket) const override {
    if (ticket.signature.size() != kSignatureBytes) {
      return absl::UnauthenticatedError(absl::StrCat("ticket signature has ",
                                                     ticket.signature.size(), " bytes, not 64"));
    }
    if (ticket.payload.size() > kTicketPayloadBytesMax) {
      return absl::InvalidArgumentError("ticket payload is longer than any ticket");
    }
    const std::string text = Signed(ticket.payload);
    Context context(EVP_MD_CTX_new());
    KVT_CHECK(context != nullptr);
    KVT_CHECK(EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1);
    const int good = EVP_DigestVerify(context.get(), Bytes(ticket.signature),
                                      ticket.signature.size(), Bytes(text), text.size());
    if (good != 1) {
      ERR_clear_error();
      return absl::UnauthenticatedError("ticket signature does not match: not of this coordinator");
    }
    return DecodeTicket(ticket.payload);
  }

 private:
  const Key key_;
};

Key MakeKey() {
  Key key(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"));
  KVT_CHECK(key != nullptr);
  return key;
}

absl::Status FileError(absl::string_view path, int error) {
  const std::string message = absl::StrCat("ticket key file ", path, ": ", std::strerror(error));
  return error == EACCES || error == EPERM ? absl::PermissionDeniedError(message)
                                           : absl::UnavailableError(message);
}

absl::StatusOr<Key> Load(const std::string& path, File file) {
  struct stat info {};
  if (fstat(fileno(file.get()), &info) != 0) return FileError(path, errno);
  if ((info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("ticket key file ", path, ": others may access it; chmod 600 it"));
  }
  Key key(PEM_read_PrivateKey(file.get(), nullptr, nullptr, nullptr));
  if (key == nullptr || EVP_PKEY_get_id(key.get()) != EVP_PKEY_ED25519) {
    ERR_clear_error();
    return absl::InvalidArgumentError(
        absl::StrCat("ticket key file ", path, ": not an Ed25519 private key in PEM form"));
  }
  return key;
}

// Writes beside `path` and links, so that of two coordinators started at once one key wins and a
// half-written file is never seen.
absl::Status Store(const std::string& path, const Key& key) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".new");
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return FileError(temporary, errno);
  File file(fdopen(fd, "w"));
  KVT_CHECK(file != nullptr);
  const bool written =
      PEM_write_PrivateKey(file.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr) == 1 &&
      std::fflush(file.get()) == 0 && fsync(fd) == 0;
  int error = written ? 0 : (errno != 0 ? errno : EIO);
  if (error == 0 && link(temporary.c_str(), path.c_str()) != 0) error = errno;
  unlink(temporary.c_str());
  return error == 0 ? absl::OkStatus() : FileError(path, error);
}

}  // namespace

std::unique_ptr<TicketSigner> TicketSigner::Generate() {
  return std::make_unique<Signer>(MakeKey());
}

absl::StatusOr<std::unique_ptr<TicketSigner>> TicketSigner::LoadOrCreate(absl::string_view where) {
  const std::string path(where);
  File file(std::fopen(path.c_str(), "re"));
  if (file == nullptr && errno == ENOENT) {
    const Key made = MakeKey();
    const absl::Status stored = Store(path, made);
    file.reset(std::fopen(path.c_str(), "re"));  // ours, or the one of who was first
    if (file == nullptr) return stored.ok() ? FileError(path, errno) : stored;
  }
  if (file == nullptr) return FileError(path, errno);
  KVT_ASSIGN_OR_RETURN(Key key, Load(path, std::move(file)));
  return std::unique_ptr<TicketSigner>(std::make_unique<Signer>(std::move(key)));
}

absl::StatusOr<std::unique_ptr<TicketVerifier>> TicketVerifier::FromPublicKey(
    absl::string_view raw32) {
  Key key;
  if (raw32.size() == kPublicKeyBytes) {
    key.reset(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, Bytes(raw32), raw32.size()));
  }
  if (key == nullptr) {
    ERR_clear_error();
    return absl::InvalidArgumentError(
        absl::StrCat("ticket public key: ", raw32.size(), " bytes, expected 32 of Ed25519"));
  }
  return std::unique_ptr<TicketVerifier>(std::make_unique<Verifier>(std::move(key)));
}

}  // namespace kvt
