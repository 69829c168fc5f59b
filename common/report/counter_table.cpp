// The table of counters: their ncu names and meanings.
#include <algorithm>
#include <array>

#include "report/counters.h"

namespace attn::report {
namespace {

using enum Better;

constexpr std::string_view kStallMeaning[] = {
    "cycles per instruction in which a warp waits for global or local memory",
    "cycles per instruction in which a warp waits for shared memory or the special-function unit",
    "cycles per instruction in which a warp waits at __syncthreads(): uneven work, or too many "
    "barriers",
    "cycles per instruction in which a warp waits for a place in the queue of shared memory",
    "cycles per instruction in which a warp waits for a place in the queue of global memory",
    "cycles per instruction in which a warp waits for the arithmetic units: normal near a tensor "
    "roof",
    "cycles per instruction of fixed latency between dependent instructions",
    "cycles per instruction in which a warp was ready and another was issued: enough warps",
};

constexpr Counter stall(std::string_view key, std::string_view label, int meaning,
                        Better better = lower) {
  return {key, label, "cycles", kStallMeaning[meaning], better, Kind::ratio, Total::by_time, 0.1};
}

constexpr std::array kCounters = {
    // Read from the export.
    Counter{"time_s", "time", "s",
            "duration of the launch under ncu, which serialises and may slow it", lower,
            Kind::count, Total::sum, 1e-9},
    Counter{"hbm_read_bytes", "HBM read", "byte", "bytes from device memory: what L2 did not keep",
            lower},
    Counter{"hbm_write_bytes", "HBM write", "byte", "bytes to device memory", lower},
    Counter{"l2_bytes", "L2 traffic", "byte",
            "bytes through L2: what L1 and registers did not keep", lower},
    Counter{"ld_requests", "load requests", "", "load instructions of warps to global memory",
            lower},
    Counter{"ld_sectors", "load sectors", "sector", "sectors of 32 bytes that these loads touched",
            lower},
    Counter{"st_requests", "store requests", "", "store instructions of warps to global memory",
            lower},
    Counter{"st_sectors", "store sectors", "sector",
            "sectors of 32 bytes that these stores touched", lower},
    Counter{"shared_ld_conflicts", "conflicts, loads", "",
            "extra passes of shared loads over the banks", lower},
    Counter{"shared_st_conflicts", "conflicts, stores", "",
            "extra passes of shared stores over the banks", lower},
    Counter{"shared_wavefronts", "shared wavefronts", "", "passes over the banks of shared memory",
            lower},
    Counter{"shared_ld_wavefronts", "wavefronts, loads", "", "passes over the banks for loads",
            lower},
    Counter{"shared_st_wavefronts", "wavefronts, stores", "", "passes over the banks for stores",
            lower},
    Counter{"tensor_bf16_ops", "tensor ops, bf16", "op", "operations of the tensor cores on bf16"},
    Counter{"tensor_fp16_ops", "tensor ops, fp16", "op", "operations of the tensor cores on fp16"},
    Counter{"ffma", "FP32 multiply-adds", "", "fused multiply-adds of threads, 2 operations each"},
    Counter{"fadd", "FP32 additions", "", "additions of threads"},
    Counter{"fmul", "FP32 multiplications", "", "multiplications of threads"},
    Counter{"instructions", "instructions", "inst",
            "instructions that warps executed, of all kinds", lower},
    Counter{"xu_instructions", "special-function inst.", "inst",
            "instructions of the special-function unit: exponentials, conversions", lower},
    Counter{"warps_active_pct", "warps resident", "%", "warps on a multiprocessor, of its maximum",
            higher, Kind::ratio, Total::by_time},
    Counter{"warps_possible_pct", "warps possible", "%",
            "what registers, shared memory and block size leave of that maximum", higher,
            Kind::ratio, Total::by_time},
    Counter{"registers", "registers per thread", "",
            "what a thread keeps; too many leave fewer warps", neither, Kind::ratio,
            Total::largest},
    Counter{"shared_per_block_bytes", "shared memory per block", "byte", "static and dynamic",
            neither, Kind::ratio, Total::largest},
    stall("stall_long_scoreboard", "stall long scoreboard", 0),
    stall("stall_short_scoreboard", "stall short scoreboard", 1),
    stall("stall_barrier", "stall barrier", 2),
    stall("stall_mio_throttle", "stall MIO throttle", 3),
    stall("stall_lg_throttle", "stall LG throttle", 4),
    stall("stall_math_pipe_throttle", "stall math pipe throttle", 5, neither),
    stall("stall_wait", "stall wait", 6),
    stall("stall_not_selected", "stall not selected", 7, neither),
    // Derived.
    Counter{"ld_sectors_per_request", "load sectors/request", "",
            "sectors of 32 bytes that a warp's load touches: 4 for neighbouring words of 4 bytes, "
            "16 for "
            "vectors of 16, 32 if each thread is elsewhere",
            lower, Kind::ratio},
    Counter{"st_sectors_per_request", "store sectors/request", "",
            "sectors of 32 bytes that a warp's store touches: 4 for neighbouring words of 4 bytes, "
            "32 if "
            "each thread is elsewhere",
            lower, Kind::ratio},
    Counter{"bank_conflict_pct", "bank conflicts", "%",
            "passes over shared memory that were repeats: several threads, one bank, other words",
            lower, Kind::ratio},
    Counter{"hbm_per_l2_pct", "HBM of L2 traffic", "%",
            "bytes of device memory for those through L2: how little L2 keeps", neither,
            Kind::ratio},
    Counter{"tensor_ops_per_inst", "tensor ops/instruction", "op",
            "tensor operations for each instruction: how much of the code is matrix product",
            higher, Kind::ratio},
    Counter{"tensor_ops", "tensor ops", "op", "operations of the tensor cores, bf16 and fp16",
            neither},
    Counter{"operations", "operations", "op", "of the tensor cores and of the FP32 units", neither},
    Counter{"hbm_bytes", "HBM traffic", "byte", "bytes from and to device memory", lower},
    Counter{"hbm_bytes_per_s", "HBM rate", "byte/s", "achieved; compare with the roof of HBM",
            higher, Kind::rate},
    Counter{"l2_bytes_per_s", "L2 rate", "byte/s", "achieved; compare with the roof of L2", higher,
            Kind::rate},
    Counter{"tensor_ops_per_s", "tensor rate", "op/s",
            "achieved; compare with the roof of the type", higher, Kind::rate},
};

struct Names {
  std::string_view key;
  NcuName name;
};

// The name in ncu 2025 first, then the names in other versions, pages and sections.
constexpr Names kNames[] = {
    {"time_s", {"gpu__time_duration.sum"}},
    {"time_s", {"gpu__time_duration.avg"}},
    {"time_s", {"Duration"}},
    {"hbm_read_bytes", {"dram__bytes_read.sum"}},
    {"hbm_read_bytes", {"dram__sectors_read.sum", 32}},
    {"hbm_write_bytes", {"dram__bytes_write.sum"}},
    {"hbm_write_bytes", {"dram__sectors_write.sum", 32}},
    {"l2_bytes", {"lts__t_bytes.sum"}},
    {"l2_bytes", {"lts__t_sectors.sum", 32}},
    {"ld_requests", {"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"}},
    {"ld_sectors", {"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"}},
    {"st_requests", {"l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"}},
    {"st_sectors", {"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"}},
    {"shared_ld_conflicts", {"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"}},
    {"shared_st_conflicts", {"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"}},
    {"shared_wavefronts", {"l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"}},
    {"shared_ld_wavefronts", {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"}},
    {"shared_st_wavefronts", {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"}},
    {"tensor_bf16_ops", {"sm__ops_path_tensor_src_bf16_dst_fp32.sum"}},
    {"tensor_fp16_ops", {"sm__ops_path_tensor_src_fp16.sum"}},
    {"ffma", {"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"}},
    {"fadd", {"smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"}},
    {"fmul", {"smsp__sass_thread_inst_executed_op_fmul_pred_on.sum"}},
    {"instructions", {"sm__inst_executed.sum"}},
    {"instructions", {"smsp__inst_executed.sum"}},
    {"instructions", {"Executed Instructions"}},
    {"xu_instructions", {"sm__inst_executed_pipe_xu.sum"}},
    {"xu_instructions", {"smsp__inst_executed_pipe_xu.sum"}},
    {"warps_active_pct", {"sm__warps_active.avg.pct_of_peak_sustained_active"}},
    {"warps_active_pct", {"Achieved Occupancy"}},
    {"warps_possible_pct", {"sm__maximum_warps_per_active_cycle_pct"}},
    {"warps_possible_pct", {"Theoretical Occupancy"}},
    {"registers", {"launch__registers_per_thread"}},
    {"registers", {"Registers Per Thread"}},
    {"shared_per_block_bytes", {"launch__shared_mem_per_block"}},
    {"stall_long_scoreboard",
     {"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"}},
    {"stall_short_scoreboard",
     {"smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio"}},
    {"stall_barrier", {"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"}},
    {"stall_mio_throttle",
     {"smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio"}},
    {"stall_lg_throttle", {"smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio"}},
    {"stall_math_pipe_throttle",
     {"smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio"}},
    {"stall_wait", {"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"}},
    {"stall_not_selected",
     {"smsp__average_warps_issue_stalled_not_selected_per_issue_active.ratio"}},
};

}  // namespace

std::span<const Counter> all_counters() { return kCounters; }

const Counter* find_counter(std::string_view key) {
  const auto* found = std::find_if(kCounters.begin(), kCounters.end(),
                                   [&](const Counter& c) { return c.key == key; });
  return found == kCounters.end() ? nullptr : found;
}

std::vector<NcuName> ncu_names(std::string_view key) {
  std::vector<NcuName> names;
  for (const Names& n : kNames)
    if (n.key == key) names.push_back(n.name);
  return names;
}

}  // namespace attn::report
