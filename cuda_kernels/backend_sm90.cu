// The row of the Hopper family.
// Architectures: 90a
#include "backends.h"

namespace sage2 {
namespace {

cudaError_t load() {
  cudaError_t err = load_quantize();
  if (err == cudaSuccess) err = load_forward_sm90();
  if (err == cudaSuccess) err = load_pages();
  return err;
}
cudaError_t prepare(const Params &p, int sm_count, cudaStream_t stream) {
  return launch_quantize(p, false, true, sm_count, stream);
}

}  // namespace

extern const Backend sm90;
const Backend sm90 = {
    load,
    query_tile_rows,
    prepare,
    launch_forward_sm90,
    launch_pages_append,
    plan_pages_attend,
    launch_pages_attend,
    128,
    true,
    false,
};

}  // namespace sage2
