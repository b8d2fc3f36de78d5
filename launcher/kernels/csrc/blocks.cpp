// The update rules. CMakeLists.txt compiles this file once for each instruction set, as namespace LAUNCH_ISA.
//
// A rule is a formula for one element. Spans are worked on in blocks that stay in the first cache: 16-bit elements are
// widened into scratch memory, the formula runs over fp32, the results are narrowed. So there is no loop for each
// mixture of dtypes. The one mixture that most training has, bf16 gradient in and bf16 weight out, is converted within
// the loop: that is worth 5 %, what the scratch memory costs.
//
// The loops are plain C++ that compilers turn into vectors. They may not choose the rounding (-ffp-contract=off):
// `fma` stands where torch's own CPU kernels fuse, and so fp32 results have their bits, with every instruction set.
// No functions of the standard library's templates here: the linker would keep one copy of each for all instruction
// sets, maybe the one with AVX-512.
#include "spans.h"

#include "convert.h"

#include <math.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <type_traits>

namespace launch::LAUNCH_ISA {
namespace {

constexpr int64_t BLOCK_NUMEL = 1024;
constexpr int64_t RUN_NUMEL = 128;
constexpr int64_t AHEAD_NUMEL = 512;

using Bf16 = uint16_t;
struct Nothing {};

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float read(const float* from) { return *from; }
inline float read(const Bf16* from) { return widen_bf16(*from); }
inline void write(Bf16* to, float value) { *to = narrow_bf16(value); }
inline void write(Nothing*, float) {}

// Up to BLOCK_NUMEL elements of an array as fp32: in place, or a copy that `store` writes back.
class Block {
 public:
  void load(const Array& array, int64_t begin, int64_t numel) {
    values = array.dtype == FP32 ? static_cast<float*>(array.data) + begin : scratch_;
    if (array.dtype == BF16) widen_bf16(static_cast<const uint16_t*>(array.data) + begin, scratch_, numel);
    if (array.dtype == FP16) widen_fp16(static_cast<const uint16_t*>(array.data) + begin, scratch_, numel);
  }

  void store(const Array& array, int64_t begin, int64_t numel) const {
    if (array.dtype == BF16) narrow_bf16(values, static_cast<uint16_t*>(array.data) + begin, numel);
    if (array.dtype == FP16) narrow_fp16(values, static_cast<uint16_t*>(array.data) + begin, numel);
  }

  float* values = nullptr;

 private:
  alignas(64) float scratch_[BLOCK_NUMEL];
};

// ---- one class for each rule: its coefficients, and the step of one element ----

// Weight decay that acts through the gradient. Without it the weights are not looked at: they may be infinite.
struct Decay {
  float operator()(float grad, float master) const {
    const float decayed = fma(master, weight_decay, grad);
    return weight_decay == 0 ? grad : decayed;
  }
  float weight_decay;
};

// Choices that hold for a whole loop are floats that are compared with 0: GCC makes masks of these, and none of a bool,
// when 16-bit elements are in the loop.
using Choice = float;

// The running means that Adam and LAMB share.
struct Moments {
  explicit Moments(const Rule& rule)
      : starts_at_grad(fabs(1 - rule.beta1) >= 0.5),
        lerp(float(1 - rule.beta1) - starts_at_grad),
        beta2(float(rule.beta2)),
        square(float(1 - rule.beta2)),
        correction1(rule.corrects_bias ? 1 - pow(rule.beta1, double(rule.step)) : 1.0),
        correction2(rule.corrects_bias ? 1 - pow(rule.beta2, double(rule.step)) : 1.0) {}

  // torch's lerp starts from the nearer end.
  float first(float exp_avg, float grad) const {
    return fma(lerp, grad - exp_avg, starts_at_grad != 0 ? grad : exp_avg);
  }
  float second(float exp_avg_sq, float grad) const { return fma(square * grad, grad, exp_avg_sq * beta2); }

  Choice starts_at_grad;
  float lerp, beta2, square;
  double correction1, correction2;
};

struct Adam {
  static constexpr int NUM_STATES = 2;

  explicit Adam(const Rule& rule)
      : moments(rule),
        decay{rule.is_decoupled ? 0.0f : float(rule.weight_decay)},
        keep(rule.is_decoupled ? float(1 - rule.lr * rule.weight_decay) : 1.0f),
        minus_lr(float(-(rule.lr / moments.correction1))),
        correction(float(sqrt(moments.correction2))),
        eps(float(rule.eps)) {}

  float step(float master, float grad, float& exp_avg, float& exp_avg_sq) const {
    grad = decay(grad, master);
    exp_avg = moments.first(exp_avg, grad);
    exp_avg_sq = moments.second(exp_avg_sq, grad);
    return master * keep + minus_lr * exp_avg / (sqrtf(exp_avg_sq) / correction + eps);
  }

  Moments moments;
  Decay decay;
  float keep, minus_lr, correction, eps;
};

struct Adagrad {
  static constexpr int NUM_STATES = 1;

  explicit Adagrad(const Rule& rule)
      : decay{float(rule.weight_decay)},
        minus_lr(float(-(rule.lr / (1 + double(rule.step - 1) * rule.lr_decay)))),
        eps(float(rule.eps)) {}

  float step(float master, float grad, float& sum) const {
    grad = decay(grad, master);
    sum = fma(grad, grad, sum);
    return master + minus_lr * grad / (sqrtf(sum) + eps);
  }

  Decay decay;
  float minus_lr, eps;
};

struct Lion {
  static constexpr int NUM_STATES = 1;

  explicit Lion(const Rule& rule)
      : keep(float(1 - rule.lr * rule.weight_decay)),
        lr(float(rule.lr)),
        beta1(float(rule.beta1)),
        grad1(float(1 - rule.beta1)),
        beta2(float(rule.beta2)),
        grad2(float(1 - rule.beta2)) {}

  float step(float master, float grad, float& exp_avg) const {
    const float direction = exp_avg * beta1 + grad * grad1;
    const float sign = float(direction > 0) - float(direction < 0);  // of NaN 0, as torch.sign has it
    exp_avg = fma(grad, grad2, exp_avg * beta2);
    return master * keep - lr * sign;
  }

  float keep, lr, beta1, grad1, beta2, grad2;
};

struct Sgd {
  static constexpr int NUM_STATES = 0;

  explicit Sgd(const Rule& rule) : decay{float(rule.weight_decay)}, minus_lr(float(-rule.lr)) {}

  float step(float master, float grad) const { return fma(decay(grad, master), minus_lr, master); }

  Decay decay;
  float minus_lr;
};

struct Momentum {
  static constexpr int NUM_STATES = 1;

  explicit Momentum(const Rule& rule)
      : sgd(rule),
        momentum(float(rule.momentum)),
        grad_share(float(1 - rule.dampening)),
        is_first(rule.is_first != 0),
        is_nesterov(rule.is_nesterov != 0) {}

  float step(float master, float grad, float& buffer) const {
    grad = sgd.decay(grad, master);
    const float mean = fma(grad, grad_share, buffer * momentum);
    buffer = is_first != 0 ? grad : mean;
    const float ahead = fma(buffer, momentum, grad);
    return fma(is_nesterov != 0 ? ahead : buffer, sgd.minus_lr, master);
  }

  Sgd sgd;
  float momentum, grad_share;
  Choice is_first, is_nesterov;
};

// In two passes, because the trust ratio is known only after the first.
struct Lamb {
  explicit Lamb(const Rule& rule)
      : moments(rule),
        minus_lr(float(-(rule.lr * rule.trust_ratio))),
        weight_decay(float(rule.weight_decay)),
        factor1(float(1 / moments.correction1)),
        factor2(float(1 / moments.correction2)),
        eps_inside(rule.is_eps_inside_root ? float(rule.eps) : 0.0f),
        eps_outside(rule.is_eps_inside_root ? 0.0f : float(rule.eps)) {}

  float direction(float master, float exp_avg, float exp_avg_sq) const {
    const float root = sqrtf(exp_avg_sq * factor2 + eps_inside) + eps_outside;
    return fma(master, weight_decay, exp_avg * factor1 / root);
  }

  void update_moments(int64_t numel, float scale, const float* __restrict master, const float* __restrict grad,
                      float* __restrict exp_avg, float* __restrict exp_avg_sq, float* __restrict directions) const {
    for (int64_t i = 0; i < numel; ++i) {
      exp_avg[i] = moments.first(exp_avg[i], grad[i] * scale);
      exp_avg_sq[i] = moments.second(exp_avg_sq[i], grad[i] * scale);
      directions[i] = direction(master[i], exp_avg[i], exp_avg_sq[i]);
    }
  }

  void move(int64_t numel, float* __restrict master, const float* __restrict exp_avg,
            const float* __restrict exp_avg_sq) const {
    for (int64_t i = 0; i < numel; ++i)
      master[i] = fma(direction(master[i], exp_avg[i], exp_avg_sq[i]), minus_lr, master[i]);
  }

  Moments moments;
  float minus_lr, weight_decay, factor1, factor2, eps_inside, eps_outside;
};

// ---- sums ----

// Squares of fp32 as doubles, where they are exact and cannot overflow. Element i of a block goes to lane i mod 32, and
// the lanes are added in order: the result depends on the blocks and on no instruction set.
class SumOfSquares {
 public:
  void add(const float* values, int64_t numel) {
    Lanes lanes[4] = {lanes_[0], lanes_[1], lanes_[2], lanes_[3]};  // in registers
    const auto add_32 = [&lanes](const float* from) {
      for (int k = 0; k < 4; ++k) add_squares(lanes[k], from + 8 * k);
    };
    int64_t i = 0;
    for (; i + 32 <= numel; i += 32) add_32(values + i);
    if (i < numel) {
      float rest[32] = {};
      __builtin_memcpy(rest, values + i, (numel - i) * sizeof(float));
      add_32(rest);
    }
    for (int k = 0; k < 4; ++k) lanes_[k] = lanes[k];
  }

  double total() const {
    double sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += lanes_[lane / 8][lane % 8];
    return sum;
  }

 private:
  typedef float Floats __attribute__((vector_size(32)));
  typedef double Lanes __attribute__((vector_size(64)));

  static void add_squares(Lanes& lanes, const float* values) {
#if defined(__AVX512F__)
    const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(values));
    lanes = _mm512_fmadd_pd(wide, wide, lanes);  // the product is exact: fused or not is the same
#else
    Floats floats;
    __builtin_memcpy(&floats, values, sizeof floats);
    const Lanes wide = __builtin_convertvector(floats, Lanes);
    lanes += wide * wide;
#endif
  }

  Lanes lanes_[4] = {};
};

// ---- what the table offers ----

template <class Function>
void for_each_block(int64_t begin, int64_t end, Function function) {
  for (; begin < end; begin += BLOCK_NUMEL) function(begin, end - begin < BLOCK_NUMEL ? end - begin : BLOCK_NUMEL);
}

// Copy RUN_NUMEL weights past the caches, so that their lines are not read first: worth 3 % of a bf16 step.
inline void stream(const Bf16* from, Bf16* to) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    for (int64_t i = 0; i < RUN_NUMEL; i += 8)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), *reinterpret_cast<const __m128i*>(from + i));
    return;
  }
#endif
  __builtin_memcpy(to, from, RUN_NUMEL * sizeof(Bf16));
}

// Ask for the lines of a run to come, line by line in the order of their use: five streams at once are more than the
// CPU's own prefetcher keeps up with. Worth 5 % of a bf16 step on one thread, and nothing where everything is fp32. Past
// the end of an array it does nothing.
template <class Rule>
inline void fetch_ahead(const float* master, const Bf16* grad, const float* state0, const float* state1) {
  for (int64_t i = AHEAD_NUMEL; i < AHEAD_NUMEL + RUN_NUMEL; i += 16) {
    __builtin_prefetch(master + i, 1);
    if (Rule::NUM_STATES > 0) __builtin_prefetch(state0 + i, 1);
    if (Rule::NUM_STATES > 1) __builtin_prefetch(state1 + i, 1);
    if (i % 32 == 0) __builtin_prefetch(grad + i, 0);
  }
}

template <class Rule, class Grad, class Param>
[[gnu::always_inline]] inline void step(const Rule rule, int64_t numel, float scale, float* __restrict master,
                                        const Grad* __restrict grad, float* __restrict state0,
                                        float* __restrict state1, Param* __restrict param) {
  for (int64_t i = 0; i < numel; ++i) {
    const float scaled = read(grad + i) * scale;
    float updated, first = Rule::NUM_STATES > 0 ? state0[i] : 0.0f, second = Rule::NUM_STATES > 1 ? state1[i] : 0.0f;
    if constexpr (Rule::NUM_STATES == 0) updated = rule.step(master[i], scaled);
    if constexpr (Rule::NUM_STATES == 1) updated = rule.step(master[i], scaled, first);
    if constexpr (Rule::NUM_STATES == 2) updated = rule.step(master[i], scaled, first, second);
    if constexpr (Rule::NUM_STATES > 0) state0[i] = first;
    if constexpr (Rule::NUM_STATES > 1) state1[i] = second;
    master[i] = updated;
    write(param + i, updated);
  }
}

// What reads and writes bf16 goes in runs whose weights are streamed.
template <class Rule>
void step_block(const Rule rule, int64_t numel, float scale, float* __restrict master, const Bf16* __restrict grad,
                float* __restrict state0, float* __restrict state1, Bf16* __restrict param) {
  alignas(64) Bf16 params[RUN_NUMEL];
  int64_t i = 0;
  for (; i + RUN_NUMEL <= numel; i += RUN_NUMEL) {
    fetch_ahead<Rule>(master + i, grad + i, state0 + i, state1 + i);
    step(rule, RUN_NUMEL, scale, master + i, grad + i, state0 + i, state1 + i, params);
    stream(params, param + i);
  }
  step(rule, numel - i, scale, master + i, grad + i, state0 + i, state1 + i, param + i);
}

template <class Rule>
void step_block(const Rule rule, int64_t numel, float scale, float* __restrict master, const float* __restrict grad,
                float* __restrict state0, float* __restrict state1, Nothing* __restrict param) {
  step(rule, numel, scale, master, grad, state0, state1, param);
}

// Grad: Bf16 to be read by the loop, float for what a block holds. Param: Bf16 to be written by the loop, or Nothing.
template <class Grad, class Param, class Rule>
void update_blocks(const Rule& rule, const Span& span, int64_t begin, int64_t end, float scale) {
  Block master, widened, states[2];
  for_each_block(begin, end, [&](int64_t start, int64_t numel) {
    const Grad* grad = static_cast<const Grad*>(span.grad.data) + start;
    if constexpr (std::is_same_v<Grad, float>) {
      widened.load(span.grad, start, numel);
      grad = widened.values;
    }
    master.load(span.master, start, numel);
    for (int k = 0; k < Rule::NUM_STATES; ++k) states[k].load(span.states[k], start, numel);
    Param* param = static_cast<Param*>(span.param.data) + start;
    step_block(rule, numel, scale, master.values, grad, states[0].values, states[1].values, param);
    for (int k = 0; k < Rule::NUM_STATES; ++k) states[k].store(span.states[k], start, numel);
    master.store(span.master, start, numel);
    if (std::is_same_v<Param, Nothing> && span.param.data) master.store(span.param, start, numel);
  });
#if defined(__SSE2__)
  _mm_sfence();  // streamed weights are there for whoever waits for this thread
#endif
}

template <class Rule>
void update_by(const Rule& rule, const Span& span, int64_t begin, int64_t end, float scale) {
  const bool writes_bf16 = span.param.data && span.param.dtype == BF16;
  if (span.grad.dtype == BF16 && writes_bf16) return update_blocks<Bf16, Bf16>(rule, span, begin, end, scale);
  update_blocks<float, Nothing>(rule, span, begin, end, scale);
}

void lamb_weights(const Lamb& rule, const Span& span, int64_t begin, int64_t end) {
  Block master, states[2];
  for_each_block(begin, end, [&](int64_t start, int64_t numel) {
    master.load(span.master, start, numel);
    for (int k = 0; k < 2; ++k) states[k].load(span.states[k], start, numel);
    rule.move(numel, master.values, states[0].values, states[1].values);
    master.store(span.master, start, numel);
    if (span.param.data) master.store(span.param, start, numel);
  });
}

void update(const Span& span, int64_t begin, int64_t end, float grad_scale) {
  switch (span.kind) {
    case ADAM: return update_by(Adam(span.rule), span, begin, end, grad_scale);
    case ADAGRAD: return update_by(Adagrad(span.rule), span, begin, end, grad_scale);
    case LION: return update_by(Lion(span.rule), span, begin, end, grad_scale);
    case SGD:
      if (span.rule.momentum == 0) return update_by(Sgd(span.rule), span, begin, end, grad_scale);
      return update_by(Momentum(span.rule), span, begin, end, grad_scale);
    case LAMB: return lamb_weights(Lamb(span.rule), span, begin, end);
  }
}

Sums lamb_moments(const Span& span, int64_t begin, int64_t end, float grad_scale) {
  constexpr int64_t STRIDE = 64;  // short, so that the sums of one run overlap with the loads of the next
  const Lamb rule(span.rule);
  SumOfSquares master_sum, direction_sum;
  Block master, grad, states[2];
  for_each_block(begin, end, [&](int64_t start, int64_t numel) {
    master.load(span.master, start, numel);
    grad.load(span.grad, start, numel);
    for (int k = 0; k < 2; ++k) states[k].load(span.states[k], start, numel);
    for (int64_t i = 0; i < numel; i += STRIDE) {
      float direction[STRIDE];
      const int64_t run = numel - i < STRIDE ? numel - i : STRIDE;
      rule.update_moments(run, grad_scale, master.values + i, grad.values + i, states[0].values + i,
                          states[1].values + i, direction);
      master_sum.add(master.values + i, run);
      direction_sum.add(direction, run);
    }
    for (int k = 0; k < 2; ++k) states[k].store(span.states[k], start, numel);
  });
  return {master_sum.total(), direction_sum.total()};
}

double sum_of_squares(const Array& array, int64_t begin, int64_t end) {
  SumOfSquares sum;
  Block block;
  for_each_block(begin, end, [&](int64_t start, int64_t numel) {
    block.load(array, start, numel);
    sum.add(block.values, numel);
  });
  return sum.total();
}

// Where a store goes past the caches, the line is not read first, which a store to memory otherwise costs.
#if defined(__AVX512F__)
constexpr int64_t STREAM_NUMEL = 16;
inline void stream_scaled(float* to, const float* from, float scale) {
  _mm512_stream_ps(to, _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(scale)));
}
inline void stream_bytes(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
#elif defined(__AVX__)
constexpr int64_t STREAM_NUMEL = 8;
inline void stream_scaled(float* to, const float* from, float scale) {
  _mm256_stream_ps(to, _mm256_mul_ps(_mm256_loadu_ps(from), _mm256_set1_ps(scale)));
}
inline void stream_bytes(char* to, const char* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#elif defined(__SSE2__)
constexpr int64_t STREAM_NUMEL = 4;
inline void stream_scaled(float* to, const float* from, float scale) {
  _mm_stream_ps(to, _mm_mul_ps(_mm_loadu_ps(from), _mm_set1_ps(scale)));
}
inline void stream_bytes(char* to, const char* from) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#else
constexpr int64_t STREAM_NUMEL = 1;
inline void stream_scaled(float* to, const float* from, float scale) { *to = *from * scale; }
inline void stream_bytes(char* to, const char* from) { __builtin_memcpy(to, from, sizeof(float)); }
#endif
constexpr int64_t STREAM_BYTES = STREAM_NUMEL * sizeof(float);

// Other threads may read a target as soon as this one says that it is there.
inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void copy(char* target, const char* source, int64_t begin, int64_t end) {
  const int64_t over = reinterpret_cast<uintptr_t>(target + begin) % STREAM_BYTES;
  const int64_t rest = over ? STREAM_BYTES - over : 0, head = rest < end - begin ? rest : end - begin;
  __builtin_memcpy(target + begin, source + begin, head);
  int64_t i = begin + head;
  for (; i + STREAM_BYTES <= end; i += STREAM_BYTES) stream_bytes(target + i, source + i);
  __builtin_memcpy(target + i, source + i, end - i);
  end_stream();
}

void scaled_copy(float* target, const float* source, float scale, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i < end && reinterpret_cast<uintptr_t>(target + i) % STREAM_BYTES != 0; ++i) target[i] = source[i] * scale;
  for (; i + STREAM_NUMEL <= end; i += STREAM_NUMEL) stream_scaled(target + i, source + i, scale);
  for (; i < end; ++i) target[i] = source[i] * scale;
  end_stream();
}

}  // namespace

const Kernels kernels = {LAUNCH_ISA_NAME, update, lamb_moments, sum_of_squares, scaled_copy, copy};

}  // namespace launch::LAUNCH_ISA
