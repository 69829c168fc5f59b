#include "device/captured_launch.h"

#include <string>

#if ATTN_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace attn {

#if ATTN_HAVE_CUDA
namespace {
Status status_of(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return Status::success();
  return Status::device_error(std::string(doing) + ": " + cudaGetErrorName(error));
}
}  // namespace

CapturedLaunch::~CapturedLaunch() {
  if (graph_) (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_));
  if (stream_) (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

Status CapturedLaunch::capture(const Arguments& arguments, LaunchFunction launch) {
  cudaStream_t stream = nullptr;  // synchronises with the default stream
  if (Status s = status_of(cudaStreamCreate(&stream), "creating a stream"); !s.ok()) return s;
  stream_ = stream;
  Arguments of_graph = arguments;
  of_graph.stream = stream_;
  Status s = status_of(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                       "beginning to capture");
  if (!s.ok()) return s;
  const Status launched = launch(of_graph);
  cudaGraph_t graph = nullptr;
  s = status_of(cudaStreamEndCapture(stream, &graph), "ending to capture");
  if (!launched.ok()) s = launched;
  cudaGraphExec_t executable = nullptr;
  if (s.ok()) s = status_of(cudaGraphInstantiate(&executable, graph, 0), "making a graph");
  if (graph) (void)cudaGraphDestroy(graph);
  graph_ = executable;
  return s;
}

Status CapturedLaunch::replay() {
  return status_of(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_),
                                   static_cast<cudaStream_t>(stream_)),
                   "launching a graph");
}
#else
CapturedLaunch::~CapturedLaunch() = default;
Status CapturedLaunch::capture(const Arguments&, LaunchFunction) {
  return Status::device_error("built without CUDA");
}
Status CapturedLaunch::replay() { return Status::device_error("built without CUDA"); }
#endif

}  // namespace attn
