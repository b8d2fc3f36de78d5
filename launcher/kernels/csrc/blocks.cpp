// The update rules. CMakeLists.txt compiles this file once for each instruction set, as namespace LAUNCH_ISA.
//
// A span is worked on in blocks that stay in the first cache: 16-bit elements are widened into scratch memory, the rule
// runs over fp32, the results are narrowed. So there is one loop for each rule and not one for each mixture of dtypes.
//
// The loops are plain C++ that compilers turn into vectors. They may not choose the rounding (-ffp-contract=off):
// `fma` stands where torch's own CPU kernels fuse, and so fp32 results have their bits, with every instruction set.
// No templates of the standard library here: the linker would keep one copy of each, maybe one with AVX-512, for all.
#include "spans.h"

#include "convert.h"

#include <math.h>

namespace launch::LAUNCH_ISA {
namespace {

constexpr int64_t BLOCK_NUMEL = 1024;

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

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

 protected:
  alignas(64) float scratch_[BLOCK_NUMEL];
};

// The gradient times `scale`, plus `weight_decay` times the weights.
class GradientBlock : public Block {
 public:
  void prepare(int64_t numel, float scale, const float* __restrict master, float weight_decay) {
    if (scale == 1.0f && weight_decay == 0.0f) return;
    const float* grad = values;
    values = scratch_;
    if (weight_decay == 0.0f) {
#pragma GCC ivdep  // `grad` is `values` or apart from it
      for (int64_t i = 0; i < numel; ++i) values[i] = grad[i] * scale;
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < numel; ++i) values[i] = fma(master[i], weight_decay, grad[i] * scale);
    }
  }
};

// ---- one class for each rule: its coefficients, and the step of one block ----

// The running means that Adam and LAMB share.
struct Moments {
  explicit Moments(const Rule& rule)
      : is_lerp_from_old(fabs(1 - rule.beta1) < 0.5),
        lerp(float(1 - rule.beta1) - (is_lerp_from_old ? 0.0f : 1.0f)),
        beta2(float(rule.beta2)),
        square(float(1 - rule.beta2)),
        correction1(rule.corrects_bias ? 1 - pow(rule.beta1, double(rule.step)) : 1.0),
        correction2(rule.corrects_bias ? 1 - pow(rule.beta2, double(rule.step)) : 1.0) {}

  // torch's lerp starts from the nearer end.
  float first(float exp_avg, float grad) const {
    return fma(lerp, grad - exp_avg, is_lerp_from_old ? exp_avg : grad);
  }
  float second(float exp_avg_sq, float grad) const { return fma(square * grad, grad, exp_avg_sq * beta2); }

  bool is_lerp_from_old;
  float lerp, beta2, square;
  double correction1, correction2;
};

struct Adam {
  explicit Adam(const Rule& rule)
      : moments(rule),
        weight_decay(rule.is_decoupled ? 0.0f : float(rule.weight_decay)),
        keep(rule.is_decoupled ? float(1 - rule.lr * rule.weight_decay) : 1.0f),
        minus_lr(float(-(rule.lr / moments.correction1))),
        correction(float(sqrt(moments.correction2))),
        eps(float(rule.eps)) {}

  void operator()(int64_t numel, float* __restrict master, const float* __restrict grad, float* __restrict exp_avg,
                  float* __restrict exp_avg_sq) const {
    for (int64_t i = 0; i < numel; ++i) {
      const float mean = moments.first(exp_avg[i], grad[i]), square = moments.second(exp_avg_sq[i], grad[i]);
      exp_avg[i] = mean;
      exp_avg_sq[i] = square;
      master[i] = master[i] * keep + minus_lr * mean / (sqrtf(square) / correction + eps);
    }
  }

  Moments moments;
  float weight_decay, keep, minus_lr, correction, eps;
};

struct Adagrad {
  explicit Adagrad(const Rule& rule)
      : weight_decay(float(rule.weight_decay)),
        minus_lr(float(-(rule.lr / (1 + double(rule.step - 1) * rule.lr_decay)))),
        eps(float(rule.eps)) {}

  void operator()(int64_t numel, float* __restrict master, const float* __restrict grad, float* __restrict sum,
                  float*) const {
    for (int64_t i = 0; i < numel; ++i) {
      sum[i] = fma(grad[i], grad[i], sum[i]);
      master[i] += minus_lr * grad[i] / (sqrtf(sum[i]) + eps);
    }
  }

  float weight_decay, minus_lr, eps;
};

struct Lion {
  explicit Lion(const Rule& rule)
      : keep(float(1 - rule.lr * rule.weight_decay)),
        lr(float(rule.lr)),
        beta1(float(rule.beta1)),
        grad1(float(1 - rule.beta1)),
        beta2(float(rule.beta2)),
        grad2(float(1 - rule.beta2)) {}

  void operator()(int64_t numel, float* __restrict master, const float* __restrict grad, float* __restrict exp_avg,
                  float*) const {
    for (int64_t i = 0; i < numel; ++i) {
      const float direction = exp_avg[i] * beta1 + grad[i] * grad1;
      const float sign = float(direction > 0) - float(direction < 0);  // of NaN 0, as torch.sign has it
      exp_avg[i] = fma(grad[i], grad2, exp_avg[i] * beta2);
      master[i] = master[i] * keep - lr * sign;
    }
  }

  static constexpr float weight_decay = 0;
  float keep, lr, beta1, grad1, beta2, grad2;
};

struct Sgd {
  explicit Sgd(const Rule& rule)
      : weight_decay(float(rule.weight_decay)),
        minus_lr(float(-rule.lr)),
        momentum(float(rule.momentum)),
        grad_share(float(1 - rule.dampening)),
        is_first(rule.is_first != 0),
        is_nesterov(rule.is_nesterov != 0) {}

  void operator()(int64_t numel, float* __restrict master, const float* __restrict grad, float* __restrict buffer,
                  float*) const {
    if (momentum == 0.0f) {
      for (int64_t i = 0; i < numel; ++i) master[i] = fma(grad[i], minus_lr, master[i]);
      return;
    }
    for (int64_t i = 0; i < numel; ++i) {
      const float mean = is_first ? grad[i] : fma(grad[i], grad_share, buffer[i] * momentum);
      buffer[i] = mean;
      master[i] = fma(is_nesterov ? fma(mean, momentum, grad[i]) : mean, minus_lr, master[i]);
    }
  }

  float weight_decay, minus_lr, momentum, grad_share;
  bool is_first, is_nesterov;
};

// In two passes: `update_moments` before anybody knows the trust ratio, `move` after.
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

  void update_moments(int64_t numel, const float* __restrict master, const float* __restrict grad,
                      float* __restrict exp_avg, float* __restrict exp_avg_sq, float* __restrict directions) const {
    for (int64_t i = 0; i < numel; ++i) {
      exp_avg[i] = moments.first(exp_avg[i], grad[i]);
      exp_avg_sq[i] = moments.second(exp_avg_sq[i], grad[i]);
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
    float rest[32] = {};
    __builtin_memcpy(rest, values + i, (numel - i) * sizeof(float));
    add_32(rest);
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

template <class Rule>
void update_by(const Rule& rule, const Span& span, int64_t begin, int64_t end, float grad_scale) {
  const int num_states = (span.states[0].data != nullptr) + (span.states[1].data != nullptr);
  Block master, states[2];
  GradientBlock grad;
  for_each_block(begin, end, [&](int64_t start, int64_t numel) {
    master.load(span.master, start, numel);
    grad.load(span.grad, start, numel);
    grad.prepare(numel, grad_scale, master.values, rule.weight_decay);
    for (int k = 0; k < num_states; ++k) states[k].load(span.states[k], start, numel);
    rule(numel, master.values, grad.values, states[0].values, states[1].values);
    for (int k = 0; k < num_states; ++k) states[k].store(span.states[k], start, numel);
    master.store(span.master, start, numel);
    if (span.param.data) master.store(span.param, start, numel);
  });
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
    case SGD: return update_by(Sgd(span.rule), span, begin, end, grad_scale);
    case LAMB: return lamb_weights(Lamb(span.rule), span, begin, end);
  }
}

Sums lamb_moments(const Span& span, int64_t begin, int64_t end, float grad_scale) {
  const Lamb rule(span.rule);
  SumOfSquares master_sum, direction_sum;
  Block master, states[2];
  GradientBlock grad;
  alignas(64) float direction[BLOCK_NUMEL];
  for_each_block(begin, end, [&](int64_t start, int64_t numel) {
    master.load(span.master, start, numel);
    grad.load(span.grad, start, numel);
    grad.prepare(numel, grad_scale, master.values, 0.0f);
    for (int k = 0; k < 2; ++k) states[k].load(span.states[k], start, numel);
    rule.update_moments(numel, master.values, grad.values, states[0].values, states[1].values, direction);
    for (int k = 0; k < 2; ++k) states[k].store(span.states[k], start, numel);
    master_sum.add(master.values, numel);
    direction_sum.add(direction, numel);
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

}  // namespace

const Kernels kernels = {LAUNCH_ISA_NAME, update, lamb_moments, sum_of_squares};

}  // namespace launch::LAUNCH_ISA
