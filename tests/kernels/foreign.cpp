// Hands spans from a file to the kernels of another architecture, under an emulator; see foreign.py.
//
// In: `Header`, the spans, the memory their addresses point into. Out: the memory as it is then, and the sums.
#include "spans.h"

#include <cstdio>
#include <vector>

extern "C" {
const char* launch_isa(int64_t index);
void launch_update(int64_t isa, const launch::Span* spans, int64_t num_spans, float grad_scale, int64_t num_threads);
void launch_lamb_moments(int64_t isa, const launch::Span* spans, int64_t num_spans, float grad_scale,
                         int64_t num_threads, launch::Sums* sums);
}

struct Header {
  int64_t is_lamb_moments, num_spans, num_bytes, base;  // base: the address the memory had
  double grad_scale;
};

int main(int argc, char** argv) {
  if (argc < 3) return puts(launch_isa(0)) < 0;
  Header header;
  FILE* in = fopen(argv[1], "rb");
  if (!in || fread(&header, sizeof header, 1, in) != 1) return 2;
  std::vector<launch::Span> spans(header.num_spans);
  std::vector<char> room(header.num_bytes + 64);
  char* memory = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64);
  if (fread(spans.data(), sizeof(launch::Span), spans.size(), in) != spans.size()) return 2;
  if (fread(memory, 1, header.num_bytes, in) != size_t(header.num_bytes)) return 2;
  for (launch::Span& span : spans)
    for (launch::Array* array : {&span.master, &span.grad, &span.states[0], &span.states[1], &span.param})
      if (array->data) array->data = memory + (reinterpret_cast<int64_t>(array->data) - header.base);
  std::vector<launch::Sums> sums(spans.size());
  if (header.is_lamb_moments)
    launch_lamb_moments(0, spans.data(), spans.size(), float(header.grad_scale), 2, sums.data());
  else
    launch_update(0, spans.data(), spans.size(), float(header.grad_scale), 2);
  FILE* out = fopen(argv[2], "wb");
  if (!out || fwrite(memory, 1, header.num_bytes, out) != size_t(header.num_bytes)) return 3;
  if (fwrite(sums.data(), sizeof(launch::Sums), sums.size(), out) != sums.size()) return 3;
  return fclose(out);
}
