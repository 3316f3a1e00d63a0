// The contract tests' program.
#include <gtest/gtest.h>

#include <cstring>

#include "absl/strings/numbers.h"
#include "tests/contract/transport_fixture.h"

// This program is also its tests' children (transport_fixture.h).
int main(int argc, char** argv) {
  const auto backend = [](const char* name) {
    return std::strcmp(name, "shm") == 0 ? kvt::Backend::kShm : kvt::Backend::kUcx;
  };
  uint32_t records = 0;
  if (argc == 4 && std::strcmp(argv[1], "--serve") == 0 && absl::SimpleAtoi(argv[3], &records)) {
    return kvt::ServeMain(backend(argv[2]), records);
  }
  if (argc == 5 && std::strcmp(argv[1], "--client") == 0 && absl::SimpleAtoi(argv[4], &records)) {
    return kvt::ClientMain(backend(argv[2]), argv[3], records);
  }
  if (argc == 5 && std::strcmp(argv[1], "--serve-at") == 0 && absl::SimpleAtoi(argv[4], &records)) {
    return kvt::ServeAtMain({argv[2], argv[3]}, records);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
