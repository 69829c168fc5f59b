// d2_fp8_kv: e4m3 KV cache, one scale per key and per value.
//
// parent    d1_int8_kv
// change    d1's kernel, with e4m3 codes (Fp8Codes of codes.h). From sm_89 on one instruction
//           converts two of them to fp16. On older GPUs the bits are shifted into fp16's fields,
//           which gives 2^-8 times the value, and multiplied by 2^8.
// why       e4m3 has four significant bits down to 2^-15 of the largest number, so servers use one
//           scale per head. This step keeps d1's scale per token, so that only the type differs.
//           The conversion is shorter.
// expect    the time of d1; with a scale per token larger errors
// supports  --dtype e4m3, inputs in bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths,
//           causal, windows, GQA
#include "attn/kernel.h"
#include "kernels/codes.h"
#include "kernels/quantise_kv.h"

ATTN_ATTENTION_OF(d1_int8_kv, flash_decoding::Fp8Codes);

namespace ATTN_BACKEND::d2_fp8_kv {
using namespace attn;
using flash_decoding::Fp8Codes;

Status launch(const Arguments& args) { return d1_int8_kv::attend(args, Fp8Codes()); }

// Fills the cache, once.
Status prepare(const Arguments& args) { return flash_decoding::quantise_cache<Fp8Codes>(args); }

}  // namespace ATTN_BACKEND::d2_fp8_kv
