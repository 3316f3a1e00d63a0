#include "kvstore/transport/ucx_send_guard.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace kvt {
namespace {

TEST(UcxSendGuard, Program_StandsBeforeLibc) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  EXPECT_FALSE(UcxSendGuardActive());
#else
  EXPECT_TRUE(UcxSendGuardActive());
#endif
}

TEST(UcxSendGuard, CallsFromElsewhere_SendAndFailAsEver) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  char text[] = "kvtide";
  iovec part{text, sizeof(text)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  EXPECT_EQ(sendmsg(ends[0], &message, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(text)));
  char got[sizeof(text)] = {};
  EXPECT_EQ(read(ends[1], got, sizeof(got)), static_cast<ssize_t>(sizeof(text)));
  EXPECT_STREQ(got, text);
  close(ends[1]);
  EXPECT_EQ(sendmsg(ends[0], &message, MSG_NOSIGNAL), -1);
  EXPECT_EQ(errno, EPIPE);
  close(ends[0]);
}

}  // namespace
}  // namespace kvt
