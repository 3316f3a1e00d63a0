// What a tokenizer.json says, checked: the refusals of tokenizer.h are made here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/model/tokenizer_bpe.h"

namespace kvt {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;  // found in the text after normalisation, with the content normalised
};

struct TokenizerFile {
  std::vector<std::string> token_bytes;  // id -> bytes; empty: no token
  std::vector<std::string> word_bytes;   // the same of the BPE vocabulary alone
  std::vector<BpeMerge> merges;          // by rank
  bool ignore_merges = false;
  std::vector<AddedToken> added;
  bool nfc = false;                         // the normalizer
  std::vector<std::string> split_patterns;  // for TokenizerSplit
  std::vector<int32_t> prefix_ids;
};

// NotFound; InvalidArgument or Unimplemented naming file and field.
absl::StatusOr<TokenizerFile> ReadTokenizerFile(const std::string& path);

}  // namespace kvt
