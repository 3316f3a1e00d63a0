# Paged attention, KV write, gather and scatter. Files for wider instruction sets are compiled for
# them alone and chosen at run time (paged_attention.cc).
target_sources(kvt_cpu PRIVATE
  attention_isa_avx2.cc attention_isa_avx512.cc attention_isa_avx512bf16.cc gather_scatter.cc
  write_kv.cc)
# GCC 12 warns of _mm512_undefined_ps() in its own header.
set(KVT_AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
               -Wno-maybe-uninitialized -Wno-uninitialized)
set_source_files_properties(attention_isa_avx512.cc PROPERTIES COMPILE_OPTIONS "${KVT_AVX512}")
set_source_files_properties(attention_isa_avx512bf16.cc PROPERTIES
                            COMPILE_OPTIONS "${KVT_AVX512};-mavx512bf16")
# Digests and scores, the same way (select_blocks.cc).
target_sources(kvt_cpu PRIVATE select_blocks.cc select_digest.cc select_isa_avx2.cc
  select_isa_avx512.cc select_isa_vnni.cc)
set_source_files_properties(select_blocks.cc select_digest.cc select_isa_avx2.cc
                            PROPERTIES COMPILE_OPTIONS "-O3")
set_source_files_properties(select_isa_avx512.cc PROPERTIES COMPILE_OPTIONS "${KVT_AVX512};-O3")
set_source_files_properties(select_isa_vnni.cc PROPERTIES
                            COMPILE_OPTIONS "${KVT_AVX512};-mavx512vnni;-O3")
