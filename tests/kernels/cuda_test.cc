// The CUDA device. Skipped, with the driver's reason, where there is none.
#include <gtest/gtest.h>

#include "kernels/cuda/cuda_device.h"
#include "tests/kernels/cuda_fixture.h"

namespace kvt {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(20);

TEST(CudaDevice, IndexBeyondTheDevices_IsNotFoundWithTheReason) {
  const auto device = MakeCudaDevice(1'000'000);
  EXPECT_EQ(device.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(device.status().message().find("1000000"), absl::string_view::npos);
}

TEST_F(CudaTest, StreamEventMailbox_KeepTheOrderOfDeviceH) {
  auto buffer = device_->Allocate(4096);
  ASSERT_TRUE(buffer.ok());
  auto mailbox = device_->NewMailbox(2, 100);
  ASSERT_TRUE(mailbox.ok()) << mailbox.status();
  EXPECT_TRUE(done_->Query()) << "never recorded counts as done";
  const auto other = device_->NewStream(StreamPriority::kHigh);
  const auto written = device_->NewEvent();
  // More writes than are kept in flight; the host memory is reused at once.
  for (int i = 0; i <= 20; ++i) {
    int value = i;
    stream_->WriteToDevice(buffer->data(), &value, sizeof(value));
    value = -1;
  }
  bool called = false;
  stream_->Callback([&] { called = true; });
  stream_->Record(*written);
  other->Wait(*written);
  other->CopyOnDevice((*mailbox)->DevicePayload(1), buffer->data(), sizeof(int));
  other->Post(**mailbox, 1, 77);
  ASSERT_TRUE((*mailbox)->WaitTag(1, 77, kDeadline));
  EXPECT_TRUE(called);
  EXPECT_EQ(*static_cast<const int*>((*mailbox)->HostPayload(1)), 20);
  EXPECT_EQ((*mailbox)->Tag(0), 0u);
  EXPECT_TRUE(device_->Health().ok()) << device_->Health();
}

}  // namespace
}  // namespace kvt
