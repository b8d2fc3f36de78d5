// What crosses the C ABI (launcher/kernels/cpu.py mirrors it field by field), and what each instruction set offers.
#pragma once
#include <cstdint>

namespace launch {

enum Dtype : int64_t { FP32, BF16, FP16 };
enum RuleKind : int64_t { ADAM, ADAGRAD, LION, SGD, LAMB };

struct Array {
  void* data;  // nullptr: there is none
  Dtype dtype;
};

// The fields of the rules in launcher/kernels/api.py, by their names; those a rule does not have are 0.
struct Rule {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, trust_ratio;
  int64_t step;
  int32_t is_decoupled, corrects_bias, is_nesterov, is_first, is_eps_inside_root;
};

struct Span {
  int64_t numel;
  Array master, grad, states[2], param;
  RuleKind kind;
  Rule rule;
};

struct Sums {
  double master, direction;  // of squares
};

// The same functions, compiled for one instruction set. Each works on elements [begin, end) in the calling thread, and
// its result does not depend on the instruction set: every rounding is written down (see blocks.cpp).
struct Kernels {
  const char* name;
  void (*update)(const Span& span, int64_t begin, int64_t end, float grad_scale);
  Sums (*lamb_moments)(const Span& span, int64_t begin, int64_t end, float grad_scale);
  double (*sum_of_squares)(const Array& array, int64_t begin, int64_t end);
  void (*scaled_copy)(float* target, const float* source, float scale, int64_t begin, int64_t end);
  void (*copy)(char* target, const char* source, int64_t begin, int64_t end);
};

namespace avx512 { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace baseline { extern const Kernels kernels; }

}  // namespace launch
