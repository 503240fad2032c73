"""Names of communication kernels and copies of several libraries."""

from pathlib import Path

import pytest

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.verdict import Limit, Verdict
from fsdp_inspect.importing.kernel_names import is_communication_kernel, is_peer_copy, kind_of
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.importing.kineto_traces import TraceWriter

K = EventKind
KERNELS = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": K.ALL_GATHER,
    "void deep_ep::internode::dispatch<false, 4, false, 16384, 8>(int4*, float*)": K.ALL_TO_ALL,
    "void deep_ep::intranode::combine<__nv_bfloat16, 4, 768>(int4*, float*)": K.ALL_TO_ALL,
    "void dpsk::ep::internode::dispatch<true, 4>(int4*)": K.ALL_TO_ALL,
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": K.ALL_REDUCE,
    "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>(float**)": K.ALL_REDUCE,
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*)": K.ALL_GATHER,
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8>(AllReduceParams)": K.ALL_REDUCE,
    "nvshmemi_transfer_rma": K.OTHER_COLLECTIVE,
    "mscclKernel_Sum_float_Simple_false(mscclKernelParams)": K.OTHER_COLLECTIVE,
    # DeepEP: low latency, another version, a name that was not demangled.
    "void deep_ep::internode_ll::dispatch<true, false, 3, 10, 7168>(void*, float*)": K.ALL_TO_ALL,
    "void hybrid_ep::combine_kernel<float, 8>(hybrid_ep::combine_kernel_param_t)": K.ALL_TO_ALL,
    "_ZN7deep_ep9intranode8dispatchILi8ELi768ELi8192EEEvP4int4PfPi": K.ALL_TO_ALL,
    "void hybrid_ep::device_sync_kernel(unsigned int*, unsigned int)": K.BARRIER,
    # AMD MORI: mangled, demangled, compiled at run time.
    "_ZN4mori3moe25EpDispatchIntraNodeKernelI14__hip_bfloat16EEvNS0_21EpDispatchCombineArgsIT_EE": (
        K.ALL_TO_ALL
    ),
    "void mori::moe::EpCombineInterNodeV1Kernel<hip_bfloat16>(mori::moe::EpArgs)": K.ALL_TO_ALL,
    "EpDispatchIntraNodeKernel_bf16": K.ALL_TO_ALL,
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)": K.ALL_TO_ALL,
    # NVSHMEM and its relatives.
    "void c10d::nvshmem_extension::allToAllV(void*, void*, long*, long*)": K.ALL_TO_ALL,
    "nvshmemi_barrier_on_stream_kernel(int)": K.BARRIER,
    "void rocshmem::put_nbi_wave_kernel(void*)": K.OTHER_COLLECTIVE,
    # MSCCL++: kernels with and without its namespace.
    "void mscclpp::executionKernel<__half, mscclpp::LL16Packet, true>(int, __half*)": (
        K.OTHER_COLLECTIVE
    ),
    "void allreduce7<__half>(__half*, mscclpp::DeviceHandle<mscclpp::MemoryChannel>*)": (
        K.ALL_REDUCE
    ),
    "void allgather8<false>(void*, mscclpp::DeviceHandle<mscclpp::MemoryChannel>*)": K.ALL_GATHER,
    # RCCL and others of its kind.
    "rcclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": K.OTHER_COLLECTIVE,
    "oneccl_allreduce_pcie[SIMD32 {256; 1; 1} {64; 1; 1}]": K.ALL_REDUCE,
    "HcclAllGather": K.ALL_GATHER,
    "hcom_reduceScatter__123_0_1": K.REDUCE_SCATTER,
    "cnclAllReduceRing": K.ALL_REDUCE,
    "ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)": K.ALL_GATHER,
    # Custom all-reduces: FlashInfer, TensorRT-LLM, aiter, QuickReduce, TransformerEngine.
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<"
    "(flashinfer::trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 8>(int)": (
        K.ALL_REDUCE
    ),
    "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>(int const*)": K.ALL_TO_ALL,
    "void aiter::reduce_scatter_cross_device_store<__half, 8>(aiter::RankData*)": K.REDUCE_SCATTER,
    "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half>, __half>(int)": (
        K.ALL_REDUCE
    ),
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<4>(int, int)": K.ALL_GATHER,
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int)": K.REDUCE_SCATTER,
    "kuserbuffers_pushsend(int*, int*)": K.POINT_TO_POINT,
    # torch's symmetric memory.
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long)": K.BARRIER,
    "c10d::symmetric_memory::put_signal_kernel(unsigned int**, int)": K.POINT_TO_POINT,
    "void <unnamed>::two_shot_all_reduce_kernel_inplace<__nv_bfloat16, 16>(int)": K.ALL_REDUCE,
}
COMPUTE = (
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float*)",
    "void cub::DeviceReduceKernel<cub::DeviceReducePolicy>(float*)",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<4>(float*)",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, bool*, int)",
    "triton_poi_fused_add_all_gather_into_tensor_wait_tensor_0",
    "void oneflow::softmax::softmax_block_all_reduce<float>(float*)",
    "void layer_norm_warpAllReduce<float>(float*)",
    "void cutlass::Kernel2<cutlass::gemm::kernel::GemmUniversal<nvshmem_epilogue>>(Params)",
    "void flux::all_gather_gemm_kernel<cutlass::half_t>(Params)",
    "void occlusion_filter(float*)",
    "__amd_rocclr_copyBuffer",
    "__amd_rocclr_fillBufferAligned.kd",
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_communicates_is_recognised_with_its_kind(name: str) -> None:
    assert is_communication_kernel(name)
    assert kind_of(name) is KERNELS[name]


@pytest.mark.parametrize("name", COMPUTE)
def test_a_kernel_that_computes_is_none(name: str) -> None:
    assert not is_communication_kernel(name)


def test_a_copy_between_devices_is_communication_and_one_to_the_host_is_not(tmp_path) -> None:
    assert is_peer_copy("Memcpy PtoP (Device -> Device)")
    assert is_peer_copy("Memcpy Peer (Device -> Device)")
    assert not is_peer_copy("Memcpy DtoH (Device -> Pinned)")
    assert not is_peer_copy("Memcpy DtoD (Device -> Device)")
    trace = TraceWriter()
    trace.kernel("gemm", 0, 100, issued=0)
    trace.kernel(
        "Memcpy PtoP (Device -> Device)", 100, 160, issued=10, category="gpu_memcpy", bytes=64
    )
    trace.kernel(
        "Memcpy DtoH (Device -> Pinned)", 160, 200, issued=20, category="gpu_memcpy", bytes=64
    )
    import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run")
    events = open_run(tmp_path / "run").events(0)
    peers = events.where(events.kind == K.POINT_TO_POINT)
    assert (peers.end_ns - peers.start_ns).tolist() == [60_000]
    copies = events.where(events.kind == K.MEMORY_COPY)
    assert (copies.end_ns - copies.start_ns).tolist() == [40_000]


def verdict_of(trace: TraceWriter, folder: Path) -> Verdict:
    import_traces(trace.write(folder / "trace.json"), folder / "run")
    return measure_summary(open_run(folder / "run")).verdict


def test_a_trace_of_several_ranks_without_communication_allows_no_conclusion(tmp_path) -> None:
    trace = TraceWriter(world_size=8)
    trace.kernel("gemm", 0, 100, issued=0)
    verdict = verdict_of(trace, tmp_path)
    assert verdict.limit is Limit.UNKNOWN
    assert verdict.sentence == "No conclusion: this trace of 8 ranks shows no communication."


def test_a_trace_of_one_rank_without_communication_has_a_verdict(tmp_path) -> None:
    trace = TraceWriter(world_size=1)
    trace.kernel("gemm", 0, 100, issued=0)
    assert verdict_of(trace, tmp_path).limit is Limit.COMPUTE


def test_a_trace_of_an_unknown_device_allows_no_conclusion(tmp_path) -> None:
    trace = TraceWriter(world_size=1)
    trace.kernel("gemm", 0, 100, issued=0)
    for at in range(5):
        trace.add("npu_kernel", "matmul", 10.0 * at, 10.0 * at + 5)
    verdict = verdict_of(trace, tmp_path)
    assert verdict.sentence == "No conclusion: 5 events of the trace were not understood."
    notes = open_run(tmp_path / "run").notes
    assert any("5 'npu_kernel'" in note for note in notes)


@pytest.mark.parametrize(
    ("category", "launch", "collective"),
    [
        ("mtia_ccp_events", "mtia_runtime", "AllReduce_ring"),
        ("hpu_op", "hpu_runtime", "HcclAllReduce"),
        ("kernel", "xpu_runtime", "oneccl_allreduce_pcie"),
        ("kernel", "xpu_driver", "ccl::reduce_scatter"),
        ("kernel", "mlu_runtime", "cnclAllGather"),
        ("kernel", "runtime", "hcom_allReduce__1"),
    ],
)
def test_kernels_of_other_devices_are_read(
    tmp_path, category: str, launch: str, collective: str
) -> None:
    trace = TraceWriter(world_size=8)
    for at, (name, start, end) in enumerate([("matmul", 0, 50), (collective, 50, 150)]):
        arguments = {"correlation": at, "stream": at, "device": 0}
        trace.add(category, name, start, end, pid=0, tid=at, args=arguments)
        trace.add(launch, "launch", at, at + 1, args={"correlation": at})
    assert verdict_of(trace, tmp_path).limit is Limit.COMMUNICATION
    run = open_run(tmp_path / "run")
    assert not any("not understood" in note for note in run.notes)
    (step,) = measure_breakdown(run).ranks
    assert (step.step_time_ns, step.exposed_ns) == (150_000, 100_000)
