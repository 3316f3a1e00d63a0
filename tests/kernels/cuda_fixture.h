// A test of kernels on the first CUDA device; skipped, with the driver's reason, where there is
// none. With KVT_CUDA_EMULATED they run on the host instead (tests/support/cuda_emulation).
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#ifdef KVT_CUDA_EMULATED
#include "kernels/cpu/cpu_device.h"
#else
#include "kernels/cuda/cuda_device.h"
#endif

namespace kvt {

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
#ifdef KVT_CUDA_EMULATED
    auto device = MakeCpuDevice({.threads = 1});
#else
    std::string why;
    if (CudaDeviceCount(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
    auto device = MakeCudaDevice(0);
#endif
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = std::move(device).value();
    stream_ = device_->NewStream(StreamPriority::kNormal);
    done_ = device_->NewEvent();
  }
  void Drain() {
    stream_->Record(*done_);
    ASSERT_TRUE(done_->HostWait(absl::Seconds(20)));
    ASSERT_TRUE(device_->Health().ok()) << device_->Health();
  }
  DeviceBuffer Upload(const void* data, size_t bytes) {
    auto buffer = device_->Allocate(bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    stream_->CopyToDevice(buffer->data(), data, bytes);
    Drain();
    return std::move(buffer).value();
  }
  template <typename T>
  DeviceBuffer Upload(const std::vector<T>& values) {
    return Upload(values.data(), values.size() * sizeof(T));
  }
  template <typename T>
  std::vector<T> Download(const DeviceBuffer& buffer, size_t count) {
    std::vector<T> values(count);
    stream_->CopyToHost(values.data(), buffer.data(), count * sizeof(T));
    Drain();
    return values;
  }
  [[nodiscard]] CUstream_st* Handle() {
#ifdef KVT_CUDA_EMULATED
    return nullptr;  // kernels run within the launch
#else
    return CudaStreamHandle(*stream_);
#endif
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
};

}  // namespace kvt
