// Unicode Normalization Form C (UAX #15): canonical decomposition, marks in the order of their
// combining classes, canonical composition. The tables are of the Unicode version that
// unicode_nfc_table.inc names; text of characters that Unicode had then has one form for good.
//
// Most text is in the form already: characters that never change nor join with what stands before
// them ("inert": combining class 0, NFC_Quick_Check=Yes) are passed over, eight bytes at a time
// where all are below U+0300. Only the runs from the character before another one up to the next
// inert one are worked on. A run may have any length: O(n log n) time, 16 bytes for each of its
// characters.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace kvt {

// `text`, which must be valid UTF-8, in NFC: itself when all of it is inert, else a view of `room`,
// which is overwritten; it has at most three times the bytes of `text`. Thread-safe.
[[nodiscard]] absl::string_view ToNfc(absl::string_view text, std::string& room);

// As "14.0.0".
[[nodiscard]] absl::string_view NfcUnicodeVersion();

}  // namespace kvt
