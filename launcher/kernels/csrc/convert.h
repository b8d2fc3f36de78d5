// 16-bit floats to fp32 and back, to nearest even. Infinities stay, a NaN becomes quiet and keeps its upper bits: what
// the instructions for fp16 do, so that all ways give the same bits.
#pragma once
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace launch::LAUNCH_ISA {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen_bf16(uint16_t half) { return float_of(uint32_t(half) << 16); }

inline uint16_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return uint16_t(is_nan ? (bits >> 16) | 0x40 : rounded);
}

inline float widen_fp16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (112u << 23);  // exponents start 112 lower than those of fp32
  const uint32_t special = (magnitude << 13) | 0x7f800000 | (magnitude > 0x7c00 ? 0x400000 : 0);
  const uint32_t subnormal = bits_of(float(int32_t(magnitude)) * 0x1p-24f);
  return float_of(sign | (magnitude < 0x400 ? subnormal : magnitude < 0x7c00 ? normal : special));
}

inline uint16_t narrow_fp16(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // One unit in the last place of 0.5 is fp16's smallest number: the addition rounds to a multiple of it.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  const uint32_t large = magnitude > 0x7f800000 ? nan : 0x7c00;
  return uint16_t(sign | (magnitude < 0x38800000 ? subnormal : magnitude < 0x477ff000 ? normal : large));
}

inline void widen_bf16(const uint16_t* __restrict from, float* __restrict to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = widen_bf16(from[i]);
}

inline void narrow_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = narrow_bf16(from[i]);
}

inline void widen_fp16(const uint16_t* __restrict from, float* __restrict to, int64_t numel) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= numel; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= numel; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#elif defined(__aarch64__)
  for (; i + 4 <= numel; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
  for (; i < numel; ++i) to[i] = widen_fp16(from[i]);
}

inline void narrow_fp16(const float* __restrict from, uint16_t* __restrict to, int64_t numel) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= numel; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= numel; i += 8)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  for (; i + 4 <= numel; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
  for (; i < numel; ++i) to[i] = narrow_fp16(from[i]);
}

}  // namespace
}  // namespace launch::LAUNCH_ISA
