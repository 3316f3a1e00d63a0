#include "tests/bench/malloc_count.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels/base/check.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVT_MALLOC_WRAPPED 0
#else
#define KVT_MALLOC_WRAPPED 1
#endif

extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* old, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
}

namespace kvt {
namespace {

constexpr int kStacksMax = 8;

std::atomic<bool> counting{false};
std::atomic<uint64_t> ours{0}, vendor{0};
std::atomic<int> stacks{0};
thread_local bool inside = false;

bool IsVendor(void* caller) {
  Dl_info info;
  if (dladdr(caller, &info) == 0 || info.dli_fname == nullptr) return false;
  const char* const name = std::strrchr(info.dli_fname, '/');
  return name != nullptr && (std::strncmp(name, "/libuc", 6) == 0);  // ucp, uct, ucs, ucm
}

[[maybe_unused]] void Count(void* caller) {
  if (!counting.load(std::memory_order_relaxed) || inside) return;
  inside = true;
  if (IsVendor(caller)) {
    vendor.fetch_add(1, std::memory_order_relaxed);
  } else {
    ours.fetch_add(1, std::memory_order_relaxed);
    static const bool print = std::getenv("KVT_BENCH_ALLOCATIONS") != nullptr;
    if (print && stacks.fetch_add(1) < kStacksMax) {
      void* frames[16];
      backtrace_symbols_fd(frames, backtrace(frames, 16), STDERR_FILENO);
      (void)!write(STDERR_FILENO, "--\n", 3);
    }
  }
  inside = false;
}

}  // namespace

void StartMallocCount() {
#if KVT_MALLOC_WRAPPED
  // The wrappers are in place: a call counts.
  ours = 0;
  counting = true;
  void* volatile probe = std::malloc(1);
  std::free(probe);
  KVT_CHECK(ours == 1, "allocations are not counted");
  ours = 0;
  vendor = 0;
#else
  KVT_CHECK(false, "a sanitizer's allocator is in place: allocations cannot be counted");
#endif
}

MallocCounts StopMallocCount() {
  counting = false;
  return MallocCounts{ours.load(), vendor.load()};
}

}  // namespace kvt

#if KVT_MALLOC_WRAPPED

extern "C" {
void* malloc(size_t size) {
  kvt::Count(__builtin_return_address(0));
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  kvt::Count(__builtin_return_address(0));
  return __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) {
  kvt::Count(__builtin_return_address(0));
  return __libc_realloc(old, size);
}
void* memalign(size_t alignment, size_t size) {
  kvt::Count(__builtin_return_address(0));
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  kvt::Count(__builtin_return_address(0));
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) {
  kvt::Count(__builtin_return_address(0));
  void* const memory = __libc_memalign(alignment, size);
  if (memory == nullptr) return ENOMEM;
  *out = memory;
  return 0;
}
}

void* operator new(size_t size) {
  kvt::Count(__builtin_return_address(0));
  void* const memory = __libc_malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t size) { return operator new(size); }
void* operator new(size_t size, std::align_val_t alignment) {
  kvt::Count(__builtin_return_address(0));
  void* const memory = __libc_memalign(static_cast<size_t>(alignment), size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

#endif  // KVT_MALLOC_WRAPPED
