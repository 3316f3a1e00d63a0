#include "kvstore/client/placement.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

constexpr int kKeys = 20'000;

BlockKey RandomKey(Random& random) {
  BlockKey key;
  for (auto& byte : key.bytes) byte = static_cast<uint8_t>(random.Next());
  return key;
}

std::vector<StoreRef> Stores(int count, uint32_t weight = 1) {
  std::vector<StoreRef> stores;
  for (int i = 0; i < count; ++i) {
    StoreRef store;
    store.name = absl::StrCat("store-", i);
    store.weight = weight;
    stores.push_back(store);
  }
  return stores;
}

std::map<std::string, double> Shares(const std::vector<StoreRef>& stores) {
  Random random(7);
  std::map<std::string, double> shares;
  for (int i = 0; i < kKeys; ++i) shares[stores[OwnerOf(RandomKey(random), stores)].name] += 1.0 / kKeys;
  return shares;
}

TEST(Placement, Groups_OfASequence_AreTheFirst64BlocksThen16Each) {
  EXPECT_EQ(GroupStart(0), 0);
  EXPECT_EQ(GroupStart(63), 0);
  EXPECT_EQ(GroupStart(64), 64);
  EXPECT_EQ(GroupStart(79), 64);
  EXPECT_EQ(GroupStart(80), 80);
  EXPECT_EQ(GroupSize(0), 64);
  EXPECT_EQ(GroupSize(64), 16);
}

TEST(Placement, Owner_OverManyKeys_IsSpreadByWeight) {
  std::vector<StoreRef> stores = Stores(4);
  for (const auto& [name, share] : Shares(stores)) EXPECT_NEAR(share, 0.25, 0.015) << name;
  stores[0].weight = 3;
  const auto shares = Shares(stores);
  EXPECT_NEAR(shares.at("store-0"), 0.5, 0.015);
  EXPECT_NEAR(shares.at("store-1"), 1.0 / 6, 0.015);
}

TEST(Placement, Owner_WhenTheOrderOfStoresChanges_IsTheSame) {
  const std::vector<StoreRef> stores = Stores(5);
  std::vector<StoreRef> reversed(stores.rbegin(), stores.rend());
  Random random(11);
  for (int i = 0; i < 1000; ++i) {
    const BlockKey key = RandomKey(random);
    EXPECT_EQ(stores[OwnerOf(key, stores)].name, reversed[OwnerOf(key, reversed)].name);
  }
}

TEST(Placement, Owner_WhenAStoreLeaves_MovesOnlyItsKeysToTheNextInOrder) {
  const std::vector<StoreRef> all = Stores(5);
  const std::vector<StoreRef> four = Stores(4);  // without store-4
  Random random(13);
  int moved = 0;
  for (int i = 0; i < kKeys; ++i) {
    const BlockKey key = RandomKey(random);
    const std::vector<int> order = RankStores(key, all);
    const std::string before = all[order[0]].name;
    const std::string after = four[OwnerOf(key, four)].name;
    if (before == "store-4") {
      ++moved;
      EXPECT_EQ(after, all[order[1]].name);
    } else {
      EXPECT_EQ(after, before);
    }
  }
  EXPECT_NEAR(static_cast<double>(moved) / kKeys, 1.0 / 5, 0.015);
}

TEST(Placement, Owner_WhenAStoreJoins_MovesOnlyWhatTheNewOneOwns) {
  const std::vector<StoreRef> before = Stores(7);
  const std::vector<StoreRef> after = Stores(8);
  Random random(17);
  int moved = 0;
  for (int i = 0; i < kKeys; ++i) {
    const BlockKey key = RandomKey(random);
    const std::string old_owner = before[OwnerOf(key, before)].name;
    const std::string new_owner = after[OwnerOf(key, after)].name;
    if (old_owner == new_owner) continue;
    ++moved;
    EXPECT_EQ(new_owner, "store-7");
  }
  EXPECT_NEAR(static_cast<double>(moved) / kKeys, 1.0 / 8, 0.015);
}

TEST(Placement, Rank_OfStores_ListsEachOnceAndLeavesOutWeightZero) {
  std::vector<StoreRef> stores = Stores(6);
  stores[2].weight = 0;
  Random random(19);
  const BlockKey key = RandomKey(random);
  std::vector<int> order = RankStores(key, stores);
  EXPECT_EQ(order.front(), OwnerOf(key, stores));
  std::sort(order.begin(), order.end());
  EXPECT_EQ(order, (std::vector<int>{0, 1, 3, 4, 5}));
  EXPECT_EQ(OwnerOf(key, {}), -1);
  EXPECT_TRUE(RankStores(key, {}).empty());
}

// The placement is a contract between builds. The pinned value is what placement_golden.py prints.
TEST(Placement, Owner_OfKnownKeys_IsPinned) {
  const std::vector<StoreRef> stores = Stores(3);
  std::string owners;
  for (int i = 0; i < 16; ++i) {
    BlockKey key;
    key.bytes.fill(static_cast<uint8_t>(i));
    absl::StrAppend(&owners, OwnerOf(key, stores));
  }
  EXPECT_EQ(owners, "2211112001102122");
}

}  // namespace
}  // namespace kvt
