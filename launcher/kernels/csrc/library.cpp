// The C ABI: which instruction sets this CPU has, and spans cut into chunks for the threads.
#include "spans.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace launch {
namespace {

constexpr int64_t ABI_VERSION = 3;  // to be raised with every change of spans.h or of the functions below

// Memory of some 2 MB: long runs for the prefetcher, and enough chunks to share out. Sums are taken by chunk and added
// in order, so they do not depend on the number of threads.
constexpr int64_t CHUNK_NUMEL = 1 << 16;

struct Chunk {
  int64_t span, begin, end;
};

void append_chunks(std::vector<Chunk>& chunks, int64_t span, int64_t numel) {
  for (int64_t begin = 0; begin < numel; begin += CHUNK_NUMEL)
    chunks.push_back({span, begin, std::min(begin + CHUNK_NUMEL, numel)});
}

std::vector<Chunk> chunks_of(const Span* spans, int64_t num_spans) {
  std::vector<Chunk> chunks;
  for (int64_t k = 0; k < num_spans; ++k) append_chunks(chunks, k, spans[k].numel);
  return chunks;
}

bool is_forked = false;
const int at_fork = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

// Run `function(k)` for k in [0, count). Each thread gets one run of neighbours, the same in every call, so that memory
// stays with the NUMA node that touched it first.
//
// A fork takes none of the threads of its parent along, but libgomp's main thread keeps waiting for them (a torch
// operation hangs there as well). A thread that is new in the child has a team of its own.
template <class Function>
void for_each(int64_t count, int64_t num_threads, const Function& function) {
  const int team = int(std::min(count, num_threads));
  const auto region = [&] {
#pragma omp parallel for num_threads(team) schedule(static)
    for (int64_t k = 0; k < count; ++k) function(k);
  };
  if (count <= 0) return;
  if (is_forked)
    std::thread(region).join();
  else
    region();
}

// Best first.
std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) usable.push_back(&avx512::kernels);
  if (has_avx2) usable.push_back(&avx2::kernels);
#endif
  usable.push_back(&baseline::kernels);
  return usable;
}

const Kernels& kernels_at(int64_t index) {
  static const std::vector<const Kernels*> usable = usable_kernels();
  return *usable[index];
}

}  // namespace
}  // namespace launch

using namespace launch;

#define LAUNCH_EXPORT __attribute__((visibility("default")))

extern "C" {

LAUNCH_EXPORT int64_t launch_abi_version() { return ABI_VERSION; }

// The name of an instruction set by its place, the best one of this CPU first; nullptr behind the last.
LAUNCH_EXPORT const char* launch_isa(int64_t index) {
  return index < int64_t(usable_kernels().size()) ? kernels_at(index).name : nullptr;
}

LAUNCH_EXPORT void launch_update(int64_t isa, const Span* spans, int64_t num_spans, float grad_scale, int64_t num_threads) {
  const Kernels& kernels = kernels_at(isa);
  const std::vector<Chunk> chunks = chunks_of(spans, num_spans);
  for_each(chunks.size(), num_threads, [&](int64_t k) {
    kernels.update(spans[chunks[k].span], chunks[k].begin, chunks[k].end, grad_scale);
  });
}

// sums: one for each span.
LAUNCH_EXPORT void launch_lamb_moments(int64_t isa, const Span* spans, int64_t num_spans, float grad_scale, int64_t num_threads,
                         Sums* sums) {
  const Kernels& kernels = kernels_at(isa);
  const std::vector<Chunk> chunks = chunks_of(spans, num_spans);
  std::vector<Sums> partial(chunks.size());
  for_each(chunks.size(), num_threads, [&](int64_t k) {
    partial[k] = kernels.lamb_moments(spans[chunks[k].span], chunks[k].begin, chunks[k].end, grad_scale);
  });
  std::fill_n(sums, num_spans, Sums{});
  for (size_t k = 0; k < chunks.size(); ++k) {
    sums[chunks[k].span].master += partial[k].master;
    sums[chunks[k].span].direction += partial[k].direction;
  }
}

LAUNCH_EXPORT double launch_sum_of_squares(int64_t isa, const Array* arrays, const int64_t* numels, int64_t num_arrays,
                             int64_t num_threads) {
  const Kernels& kernels = kernels_at(isa);
  std::vector<Chunk> chunks;
  for (int64_t k = 0; k < num_arrays; ++k) append_chunks(chunks, k, numels[k]);
  std::vector<double> partial(chunks.size());
  for_each(chunks.size(), num_threads, [&](int64_t k) {
    partial[k] = kernels.sum_of_squares(arrays[chunks[k].span], chunks[k].begin, chunks[k].end);
  });
  double sum = 0;
  for (double part : partial) sum += part;
  return sum;
}

// The stores go past the caches: for more than these hold.
LAUNCH_EXPORT void launch_scaled_copy(int64_t isa, float* target, const float* source, int64_t numel, float scale,
                                      int64_t num_threads) {
  const Kernels& kernels = kernels_at(isa);
  std::vector<Chunk> chunks;
  append_chunks(chunks, 0, numel);
  for_each(chunks.size(), num_threads, [&](int64_t k) {
    kernels.scaled_copy(target, source, scale, chunks[k].begin, chunks[k].end);
  });
}

// Bytes of any type, otherwise as `launch_scaled_copy`.
LAUNCH_EXPORT void launch_copy(int64_t isa, char* target, const char* source, int64_t num_bytes, int64_t num_threads) {
  const Kernels& kernels = kernels_at(isa);
  std::vector<Chunk> chunks;
  append_chunks(chunks, 0, num_bytes);
  for_each(chunks.size(), num_threads, [&](int64_t k) { kernels.copy(target, source, chunks[k].begin, chunks[k].end); });
}

}  // extern "C"
