// Keeps UCX 1.13's TCP transport from completing a half-sent zero-copy message twice, and so aborting
// the process, when its peer goes away (docs/decisions/0004).
//
// This program's own `sendmsg` stands before libc's. It is libc's in everything but one case: a call
// *from libucs* that fails because the peer has gone answers EAGAIN. UCX then learns of the peer from
// the receiving side of the same socket, where it completes each message once. Calls of every other
// library are passed on unchanged.
#pragma once

namespace kvt {

// Whether UCX's calls really come here: not when the program does not export the symbol (a shared
// library, a sanitizer with its own wrapper). Then zero-copy sends must stay off. Thread-safe.
bool UcxSendGuardActive();

}  // namespace kvt
