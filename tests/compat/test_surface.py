"""What transformers, accelerate and scripts use of `deepspeed`, name by name, in one process that trains one step."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.scripts import write
from harness.train.forked import run_ranks

from launcher.compat.names import REFUSED as REFUSED_MODULES

# Each statement is run by itself in the child, which has an engine at stage 3; it fails by raising.
WORKS = [
    # ---- imports, as they are written ----
    "deepspeed.monitor.config, deepspeed.monitor.monitor, deepspeed.profiling.flops_profiler.profiler",
    "deepspeed.runtime.config, deepspeed.runtime.dataloader, deepspeed.runtime.fp16.loss_scaler",
    "deepspeed.runtime.utils",
    "deepspeed.zero.config, deepspeed.zero.stage3, deepspeed.zero.stage_1_and_2, deepspeed.zero.tiling",
    "import deepspeed; assert deepspeed.__version__ == importlib.metadata.version('deepspeed')",
    "assert deepspeed.__spec__.name == 'deepspeed' and deepspeed.__path__ and deepspeed.__package__ == 'deepspeed'",
    "from deepspeed import DeepSpeedEngine, add_config_arguments, checkpointing, init_distributed, initialize, zero",
    "import deepspeed.comm as dist; assert dist is deepspeed.comm and dist.is_initialized()",
    "from deepspeed.runtime.engine import DeepSpeedEngine as other; assert other is deepspeed.DeepSpeedEngine",
    "from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, configure",
    "import deepspeed.runtime.zero.partition_parameters as pp; assert pp is deepspeed.zero.partition_parameters",
    "from deepspeed.runtime.zero import Init; assert Init is deepspeed.zero.Init is launcher.zero.Init",
    "assert issubclass(deepspeed.DeepSpeedEngine, launcher.Engine)",
    "assert deepspeed.initialize.__wrapped__ is launcher.initialize",
    "assert not any(name.startswith('launcher.compat.deepspeed') for name in sys.modules)  # nothing exists twice",
    "from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec; assert deepspeed.PipelineModule is "
    "PipelineModule and issubclass(PipelineModule, launcher.PipelineModule)",
    "from deepspeed.runtime.pipe.engine import PipelineEngine; assert PipelineEngine is deepspeed.PipelineEngine",
    "from deepspeed.runtime.pipe.module import PipelineModule as other; assert other is deepspeed.pipe.PipelineModule",
    "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology\n"
    "assert PipeModelDataParallelTopology(2, 2, 1).get_axis_comm_lists('pipe') == [[0, 2], [1, 3]]",
    # ---- comm ----
    "assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (0, 1, 0)",
    "dist.init_distributed(dist_backend=None, auto_mpi_discovery=False, timeout=datetime.timedelta(minutes=1))",
    "dist.barrier(); x = torch.ones(2); dist.all_reduce(x, op=dist.ReduceOp.SUM); dist.broadcast(x, src=0)",
    "assert dist.get_world_group() is torch.distributed.group.WORLD",
    "x = torch.ones(2); out = torch.zeros(2); dist.all_gather_into_tensor(out, x); dist.reduce_scatter_tensor(out, x)",
    "dist.all_to_all_single(out, x); dist.allgather_fn(out, x); dist.reduce_scatter_fn(out, x); assert out.sum() == 2",
    "g = dist.new_group([0]); assert dist.get_all_ranks_from_group(g) == [0] and dist.get_global_rank(g, 0) == 0",
    "dist.monitored_barrier(); objects = [3]; dist.broadcast_object_list(objects); dist.all_gather_object([None], 1)",
    "mesh = dist.initialize_mesh_device((1,), ('data',)); assert (mesh.size(), mesh.device_type) == (1, 'cpu')",
    "assert dist.get_all_ranks_from_group() == dist.get_all_ranks_from_group(group=None) == [0]",
    "dist.barrier(device_ids=[0]); dist.barrier(group=g, async_op=False, device_ids=None)",
    "assert callable(dist.send) and callable(dist.recv) and callable(dist.batch_isend_irecv) and dist.ReduceOp.AVG",
    "assert dist.log_summary() is None and not dist.has_comm_data()  # nothing is logged: a warning",
    # ---- zero ----
    "p = torch.nn.Parameter(torch.ones(2))",
    "with deepspeed.zero.GatheredParameters([p, None], modifier_rank=0): p.data.zero_()",
    "with deepspeed.zero.GatheredParameters(p): pass",
    "with deepspeed.zero.GatheredParameters((q for q in []), modifier_rank=None, fwd_module=None, enabled=True): pass",
    "with deepspeed.zero.Init(config_dict_or_path={'zero_optimization': {'stage': 3}, 'bf16': {'enabled': True}}):\n"
    "    layer = torch.nn.Linear(2, 2)\nassert layer.weight.dtype == torch.bfloat16",
    "deepspeed.zero.register_external_parameter(layer, p)",
    "saved = pp.zero_wrapper_for_fp_tensor_constructor; pp.zero_wrapper_for_fp_tensor_constructor = print\n"
    "pp.zero_wrapper_for_fp_tensor_constructor = saved",
    "assert pp.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.bfloat16)(2).dtype == torch.float32",
    "assert pp._orig_torch_arange(2).tolist() == [0, 1]",
    "assert pp.get_accelerator().device_name(0) == 'cpu'",
    "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum; assert ZeroStageEnum.weights == 3",
    "assert DeepSpeedZeroConfig(stage=2).stage == 2",
    "from deepspeed.runtime.zero.tiling import TiledLinear; TiledLinear(4, 4, in_splits=2)(torch.ones(1, 4))",
    "from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as live\n"
    "with contextlib.redirect_stdout(io.StringIO()) as said: live(torch.nn.Linear(4, 4), 1, num_nodes=1)\n"
    "assert 'per GPU' in said.getvalue() and 'zero_init=1' in said.getvalue()",
    "from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold as cold\n"
    "with contextlib.redirect_stdout(io.StringIO()) as said: cold(total_params=10**9)\n"
    "assert '1000M total params' in said.getvalue()",
    "from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3, unwrap_model_for_generation\n"
    "from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer\n"
    "assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and not isinstance(optimizer, DeepSpeedZeroOptimizer)",
    "from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer; assert isinstance(engine.optimizer, "
    "DeepSpeedOptimizer)",
    "with deepspeed.zero.unwrap_model_for_generation(engine) as gathered: assert gathered is engine",
    "assert not deepspeed.zero.utils.is_zero_param(torch.ones(1)) and not deepspeed.zero.utils.is_zero_param(p)",
    "from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum; assert OffloadDeviceEnum.cpu == 'cpu'",
    "from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3, zero3_linear_wrap\n"
    "linear = LinearModuleForZeroStage3(2, 3); x = torch.ones(1, 2)\n"
    "assert torch.equal(linear(x), zero3_linear_wrap(x, linear.weight, linear.bias))",
    "from deepspeed.runtime.torch_autocast import get_comm_dtype, has_comm_dtype\n"
    "assert get_comm_dtype(linear.weight) == torch.float32 and not has_comm_dtype(linear.weight)",
    "from deepspeed.moe.sharded_moe import MOELayer, TopKGate, einsum, top1gating, top2gating, topkgating",
    "from deepspeed.moe.mappings import drop_tokens, gather_tokens; assert drop_tokens(x) is gather_tokens(x) is x",
    # ---- names that mmengine, OpenRLHF, ms-swift, determined and MII import ----
    "assert deepspeed.version == deepspeed.__version__ and deepspeed.git_hash == deepspeed.__git_hash__",
    "from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum\n"
    "engine.optimizer.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)\n"
    "engine.reload_states(non_blocking=True)",
    "from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam\n"
    "from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam as other; assert other is ZeroOneAdam",
    "from deepspeed.launcher.runner import DLTS_HOSTFILE; assert DLTS_HOSTFILE == '/job/hostfile'",
    "from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys as once\n"
    "assert json.loads('{\"a\": 1}', object_pairs_hook=once) == {'a': 1}",
    "from deepspeed.ops.adam.fused_adam import FusedAdam; from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam\n"
    "from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion; from deepspeed.ops.lamb.fused_lamb import FusedLamb\n"
    "from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad\n"
    "assert FusedAdam is deepspeed.ops.adam.FusedAdam and DeepSpeedCPUAdam is deepspeed.ops.adam.DeepSpeedCPUAdam",
    "from deepspeed.utils.tensor_fragment import safe_get_full_fp32_param as get\n"
    "assert get is deepspeed.utils.safe_get_full_fp32_param and deepspeed.dist is deepspeed.comm",
    "from deepspeed.utils import get_data_parallel_world_size, get_tensor_model_parallel_world_size\n"
    "assert get_data_parallel_world_size() == get_tensor_model_parallel_world_size() == 1",
    "from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout\n"
    "assert default_pg_timeout.seconds > 60",
    "from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES, UNIVERSAL_CHECKPOINT_INFO",
    "from deepspeed.comm.reduce_op import ReduceOp; assert ReduceOp is dist.ReduceOp",
    "from deepspeed.runtime.engine import DeepSpeedOptimizerCallable, DeepSpeedSchedulerCallable, ZeroParamStatus",
    "from deepspeed.runtime.lr_schedules import get_config_from_args, get_lr_from_config, override_params, update_lr\n"
    "parser = deepspeed.add_tuning_arguments(argparse.ArgumentParser()); given = ['--lr_schedule', 'OneCycle', "
    "'--cycle_max_lr', '0.5', '--cycle_momentum', '--lr_range_test_staircase', 'false']\n"
    "section, why = get_config_from_args(parser.parse_args(given)); assert why is None\n"
    "assert section['type'] == 'OneCycle'\n"
    "assert section['params']['cycle_momentum'] is True and get_lr_from_config(section) == (0.5, '')\n"
    "assert get_config_from_args(parser.parse_args([]))[0] is get_lr_from_config({})[0] is None\n"
    "params = {}; override_params(parser.parse_args([]), params)\n"
    "assert params['warmup_num_steps'] == 1000 and len(params) == 20\n"
    "groups = [{'lr': torch.tensor(1.0)}, {'lr': 1.0}]; update_lr(groups, [0.5, 0.25])\n"
    "assert groups[0]['lr'].item() == 0.5 and groups[1]['lr'] == 0.25",
    "from deepspeed.profiling.flops_profiler.profiler import flops_to_string, number_to_string, params_to_string\n"
    "assert [number_to_string(0), number_to_string(1234.0), flops_to_string(2.5e12), params_to_string(7e9)] == "
    "['0 ', '1.23 K', '2.5 TFLOPS', '7 B'] and number_to_string(5e-4) == '500 u'",
    "from deepspeed.runtime.utils import clip_tensors_by_global_norm, copy_to_device, ensure_directory_exists\n"
    "list_of = [torch.full((4,), 3.0), torch.full((4,), 4.0)]\n"
    "assert clip_tensors_by_global_norm(list_of, max_norm=1.0).item() == 10 and abs(list_of[0][0] - 0.3) < 1e-6\n"
    "assert copy_to_device([1, {'x': torch.ones(1)}], 'meta', torch.is_tensor)[1]['x'].is_meta\n"
    "ensure_directory_exists('deep/er/file.txt'); assert os.path.isdir('deep/er')",
    "from deepspeed.runtime.config_utils import get_scalar_param; assert get_scalar_param({'a': 1}, 'b', 2) == 2",
    "from deepspeed.utils.logging import LoggerFactory, get_dist_msg; assert get_dist_msg('x', [1]) is None\n"
    "own = LoggerFactory.create_logger('own'); assert LoggerFactory.create_logger('own') is own\n"
    "assert len(own.handlers) == 1",
    "from deepspeed.runtime.zero.utils import is_zero_supported_optimizer as is_known\n"
    "assert is_known(torch.optim.AdamW([p])) and not is_known(torch.optim.LBFGS([p]))",
    "deepspeed.checkpointing.partition_activations_in_checkpoint(False); deepspeed.checkpointing.set_num_layers(2)",
    "config = engine._config; assert config.zero_config.stage == 3 and config.bf16.enabled is False\n"
    "assert (config.train_batch_size, config.micro_batch_size_per_gpu) == (2, 2); config.micro_batch_size_per_gpu = 4\n"
    "assert (engine.train_batch_size(), config.gradient_accumulation_steps) == (4, 1)\n"
    "config.train_micro_batch_size_per_gpu = 2; config.train_batch_size = 4\n"
    "assert engine.gradient_accumulation_steps() == 2; config.train_batch_size = 2\n"
    "with contextlib.suppress(AttributeError): config.gradient_clipping = 1.0; raise SystemExit('a write was lost')",
    "from deepspeed.elasticity import compute_elastic_config, elasticity_enabled\n"
    "rules = {'enabled': True, 'max_train_batch_size': 10000, 'micro_batch_sizes': [8, 12, 16, 17], 'min_gpus': 32, "
    "'max_gpus': 1500, 'version': 0.1}\n"
    "elastic = {'elasticity': rules}; assert elasticity_enabled(elastic) and not elasticity_enabled({})\n"
    "batch, worlds = compute_elastic_config(elastic, deepspeed.version); assert (batch, len(worlds)) == (9792, 23)\n"
    "assert compute_elastic_config(elastic, '0.19.8', world_size=64) == (batch, worlds, 17)",
    # ---- configs ----
    "from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError\n"
    "sizes = {'train_batch_size': 8, 'gradient_accumulation_steps': 2}\n"
    "read = DeepSpeedConfig({**sizes, 'zero_optimization': {'stage': 2}})\n"
    "assert (read.train_batch_size, read.train_micro_batch_size_per_gpu) == (8, 4)\n"
    "assert read.zero_optimization_stage == read.zero_config.stage == 2 and read.zero_enabled\n"
    "assert read.gradient_clipping == 1.0 and read.optimizer_name is None and read.fp16.enabled is False",
    "assert issubclass(DeepSpeedConfigError, Exception) and deepspeed.DeepSpeedConfig is DeepSpeedConfig",
    # ---- schedules ----
    "assert set(deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES) == "
    "{'LRRangeTest', 'OneCycle', 'WarmupLR', 'WarmupDecayLR', 'WarmupCosineLR'}",
    "assert all(getattr(deepspeed.runtime.lr_schedules, name).__name__ == name "
    "for name in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES)",
    # ---- accelerator, utils, checkpoint, launcher ----
    "from deepspeed.accelerator import get_accelerator; assert get_accelerator().current_device_name() == 'cpu'",
    "assert get_accelerator() is get_accelerator() and get_accelerator().communication_backend_name() == 'gloo'",
    "get_accelerator().synchronize(); assert not hasattr(get_accelerator(), 'no_such_function')",
    "a = deepspeed.get_accelerator(); a.empty_cache(); a.manual_seed(1); a.set_rng_state(a.get_rng_state())",
    "r = a.memory_reserved(); assert a.memory_allocated() > 2**20 and 0 < r <= a.max_memory_allocated()",
    "assert a.total_memory() > a.available_memory() > 0 and a.device_count() == 1",
    "assert 0 < a.memory_stats()['allocated_bytes.all.current'] <= a.memory_stats(0)['allocated_bytes.all.peak']",
    "a.synchronize(device_index=0); a.set_device(device_index=0); a.reset_peak_memory_stats(device_index=0)",
    "a.set_rng_state(new_state=a.get_rng_state(device_index=0), device_index=0)",
    "assert a.default_generator(device_index=0) is torch.default_generator",
    "a.reset_max_memory_allocated(0); a.reset_max_memory_cached(0); a.current_stream(device_index=0)",
    "with a.stream(a.default_stream(device_index=0)): pass",
    "a.range_push('a', domain='b', category='c'); a.range_pop(domain='b')",
    "assert a.pin_memory(x, make_copy=False, match_shape=False) is a.pin_memory(x, align_bytes=4) is x",
    "on_gpu = deepspeed.accelerator.Accelerator(); on_gpu._name = 'cuda'  # what it asks torch.cuda\n"
    "for name in ('synchronize', 'current_stream', 'default_stream', 'get_rng_state', 'memory_stats', "
    "'reset_peak_memory_stats'):\n"
    "    with unittest.mock.patch(f'torch.cuda.{name}') as asked:\n"
    "        getattr(on_gpu, name)(device_index=1); getattr(on_gpu, name)()\n"
    "    assert asked.call_args_list == [((torch.device('cuda', 1),),), ((torch.device('cuda'),),)], name",
    "with unittest.mock.patch('torch.cuda.set_rng_state') as asked: on_gpu.set_rng_state(3, device_index=1)\n"
    "assert asked.call_args == ((3, torch.device('cuda', 1)),)",
    "with unittest.mock.patch('torch.cuda.default_generators', (4, 5)): assert on_gpu.default_generator(1) == 5",
    "with unittest.mock.patch('torch.cuda.nvtx.range_push') as asked: on_gpu.range_push('a', domain='b')\n"
    "assert asked.call_args == (('b: a',),)",
    "assert a.is_available() and torch.bfloat16 in a.supported_dtypes() and a.use_host_timers()",
    "x = torch.ones(2); assert a.on_accelerator(x) and a.pin_memory(x) is x and not a.is_pinned(x)",
    "a.range_push('a'); a.range_pop(); a.set_device(0); assert a.get_compile_backend() == 'inductor'",
    "with a.stream(a.current_stream()): pass",
    "assert a.visible_devices_envs() == ['CUDA_VISIBLE_DEVICES'] and not a.is_triton_supported()",
    "assert a.lazy_call(lambda: 1) == 1",
    "from deepspeed.accelerator import is_current_accelerator_supported; assert is_current_accelerator_supported()",
    "assert (a.current_device(), a.device('0'), a._communication_backend_name) == (0, torch.device('cpu'), 'gloo')",
    "environ = {}; a.set_visible_devices_envs(environ, [0, 2]); assert environ == {'CUDA_VISIBLE_DEVICES': '0,2'}",
    "with unittest.mock.patch.dict(os.environ, LOCAL_SIZE='3', LOCAL_RANK='2'):\n"
    "    assert (a.device_count(), a.current_device()) == (3, 2)",
    "assert a.BFloat16Tensor([1]).dtype == torch.bfloat16 and a.FloatTensor(3).shape == (3,)",
    "assert on_gpu.HalfTensor.keywords == {'dtype': torch.half, 'device': 'cuda'}",
    "assert a.create_graph() is None and not a.is_current_stream_capturing()\n"
    "with a.capture_to_graph(None): a.replay_graph(None)",
    "assert a.pin_empty_like(x).shape == x.shape and a.pin_empty((2, 3), torch.int8).dtype == torch.int8",
    "assert a.unpin_memory(x) is None and a.export_envs() == [] and on_gpu.export_envs() == ['NCCL']",
    "assert type(a.create_op_builder('CPUAdamBuilder')).__name__ == 'CPUAdamBuilder' and a.build_extension()",
    "assert not a.get_op_builder('NoSuchBuilder')().is_compatible() and importlib.import_module(a.op_builder_dir())",
    "a.set_compile_backend('eager'); a.set_compile_backend('inductor')",
    "from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator; own = CPU_Accelerator()\n"
    "deepspeed.accelerator.set_accelerator(own); assert get_accelerator() is own\n"
    "deepspeed.accelerator.set_accelerator(a); assert get_accelerator() is a",
    "from deepspeed.git_version_info import torch_info; assert torch.__version__.startswith(torch_info['version'])",
    "from deepspeed.ops.op_builder import FusedAdamBuilder, UtilsBuilder; ops = deepspeed.ops.__compatible_ops__\n"
    "assert ops[FusedAdamBuilder.NAME] and not ops[UtilsBuilder.NAME]",
    "from deepspeed.launcher.runner import fetch_hostfile, main, parse_args; given = parse_args(['a.py'])\n"
    "from deepspeed.launcher.multinode_runner import PDSHRunner; assert PDSHRunner(given, '').name == 'pdsh'",
    "from deepspeed.utils.numa import parse_range_list; assert parse_range_list('0,2-3') == [0, 2, 3]",
    # ---- logging, timers, logs of collectives, parts, curves ----
    "from deepspeed.utils import logger; logger.warning_once('said once'); logger.log_dist_once('said', ranks=[0])",
    "from deepspeed.utils.logging import get_current_level, print_dist, print_json_dist, should_log_le, warning_once\n"
    "logger.setLevel(20); assert should_log_le('info') and should_log_le('warning') and not should_log_le('debug')\n"
    "print_json_dist({'a': 1}, ranks=[0], path='said.json'); said = json.load(open('said.json'))\n"
    "assert said == {'a': 1, 'rank': 0}",
    "with contextlib.redirect_stdout(io.StringIO()) as said: print_dist('hello', ranks=[0])\n"
    "print_dist('no', ranks=[1])\n"
    "assert said.getvalue() == '[rank 0] hello\\n'",
    "from deepspeed.utils.torch import required_torch_version; assert required_torch_version(min_version=2.0)\n"
    "assert not required_torch_version(max_version='1.9') and not required_torch_version(min_version=99)",
    "from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean\n"
    "data = [3.0, 1.0, 2.0]; assert trim_mean(data, 0.34) == 2 and data[0] == 3 and trim_mean([], 0.1) == 0",
    "timers = SynchronizedWallClockTimer(); timer = timers('a'); timer.start(); timer.stop(); timer.start()\n"
    "timer.stop()\n"
    "assert 0 < timer.mean() <= timer.elapsed(reset=False) and timers.get_timers() == {'a': timer}\n"
    "assert timers.get_mean(['a', 'b']).keys() == {'a'} and timer.elapsed() == 0\n"
    "timers.log(['a'], memory_breakdown=True)",
    "no = NoopTimer(); no('a').start(); no('a').stop(record=True); no.log(['a']); assert no('a').elapsed() == 0",
    "said, on = [], types.SimpleNamespace(enabled=True, synchronized=True)\n"
    "speed = ThroughputTimer(on, 4, start_step=1, steps_per_output=3, logging_fn=said.append)\n"
    "for _ in range(3): speed.start(); speed.stop(global_step=True)\n"
    "assert speed.global_step_count == 3 and speed.avg_samples_per_sec() > 0\n"
    "assert 'step 3: ' in said[0] and len(said) == 1",
    "from deepspeed.utils.comms_logging import CommsLogger, get_caller_func; log = CommsLogger()\n"
    "log.append('all_reduce', 'sum', 2.0, 1500); log.append('all_reduce', 'sum', 4.0, 1500)\n"
    "(size, summary), = log.get_operation_summary('sum').items()\n"
    "assert (size, summary['avg_latency_ms'], summary['msg_size_str'], log.get_total_operations()) == "
    "(1500, 3, '1.46 KB', 2)\n"
    "assert abs(log.get_raw_data()['sum'][1500][2][0] - 0.006) < 1e-9  # 12000 bits in 2 ms",
    "seen = log.log_all(show_straggler=True, return_dict=True)\n"
    "assert seen['straggler_analysis'] == {'sum': {1500: 0}}",
    "log.reset_data(); section = types.SimpleNamespace(verbose=False, debug=False, prof_all=False, prof_ops=['a'])\n"
    "log.configure(types.SimpleNamespace(comms_logger_enabled=True, comms_logger=section)); cpu = torch.device('cpu')\n"
    "from launcher.comm import observe; observe.end(observe.begin(cpu), 'b', 1, [torch.ones(2)], cpu)\n"
    "log.start_profiling_op(['b']); observe.end(observe.begin(cpu), 'b', 1, [torch.ones(2)], cpu)\n"
    "log.configure(types.SimpleNamespace(comms_logger_enabled=False)); log.start_profiling_comms()\n"
    "observe.end(time.perf_counter(), 'b', 1, [torch.ones(2)], cpu)\n"
    "assert log.prof_all and log.get_raw_data()['b'][8][0] == log.get_total_operations() == 1",
    "dist.configure(enabled=True, prof_all=False, prof_ops=['all_gather']); cpu = torch.device('cpu')\n"
    "from launcher.comm import observe; observe.end(observe.begin(cpu), 'all_gather', 1, [torch.ones(2)], cpu)\n"
    "observe.end(observe.begin(cpu), 'all_reduce', 1, [torch.ones(2)], cpu)\n"
    "seen = dist.log_summary(return_dict=True)\n"
    "assert [*seen['summary']] == ['all_gather'] and seen['summary']['all_gather'][8]['count'] == 1\n"
    "assert dist.has_comm_data(); dist.reset_log(); assert not dist.has_comm_data()\n"
    "dist.configure(enabled=False); assert deepspeed.comm.comm.configure is dist.configure",
    "y = torch.ones(2); dist.inference_all_reduce(y); assert y.sum() == 2",
    "from deepspeed.runtime.utils import PartitionedTensor, call_to_str, partition_balanced, partition_uniform\n"
    "assert partition_uniform(7, 3) == [0, 3, 5, 7] and partition_balanced([0, 1, 2, 3, 3, 3], 4) == [0, 3, 4, 5, 6]\n"
    "assert partition_balanced([0.0, 1.1, 30, 3.0], 3) == [0, 2, 3, 4] and partition_uniform(2, 4) == [0, 1, 2, 2, 2]\n"
    "assert call_to_str('f', 1, 'a', b=2) == \"f(1, 'a', b=2)\"",
    "from deepspeed.runtime.utils import CheckOverflow, get_weight_norm, is_model_parallel_parameter, prefix_sum_inc\n"
    "assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12] and get_weight_norm([torch.ones(9), torch.full((4,), 2.0)]) == 5\n"
    "assert get_weight_norm(torch.tensor(math.inf)) == -1\n"
    "plain = torch.nn.Parameter(torch.ones(2)); plain.grad = torch.tensor([1.0, math.nan])\n"
    "check = CheckOverflow([[plain]]); assert check.check() and check.check_using_norm([-1]) and not check.check([])\n"
    "assert not is_model_parallel_parameter(plain); plain.model_parallel = True\n"
    "assert is_model_parallel_parameter(plain)",
    "from deepspeed.monitor.csv_monitor import csvMonitor; from deepspeed.monitor.config import get_monitor_config\n"
    "section = {'enabled': True, 'output_path': 'curves', 'job_name': 'own'}\n"
    "curves = csvMonitor(get_monitor_config({'csv_monitor': section}).csv_monitor)\n"
    "curves.write_events([('A/b', 2, 7)])\n"
    "assert curves.enabled and curves.job_name == 'own'\n"
    "assert open('curves/own/A_b.csv').read().split() == ['step,b', '7,2.0']",
    "from deepspeed.monitor.comet import CometMonitor; from deepspeed.monitor.wandb import WandbMonitor\n"
    "off = CometMonitor(get_monitor_config({}).comet); assert not off.enabled and off.experiment is None\n"
    "off.write_events([('a', 1, 1)]); assert off.samples_log_interval == 100",
    "deepspeed.utils.logger.setLevel(30); deepspeed.utils.logger.setLevel(20)",
    "from deepspeed.utils import log_dist; log_dist('hello', ranks=[0])",
    "from deepspeed.utils.logging import log_dist_once, set_log_level_from_string; log_dist_once('hello', ranks=[0])",
    "set_log_level_from_string('warning'); assert deepspeed.logger.level == 30; set_log_level_from_string('info')",
    "with deepspeed.OnDevice(dtype=torch.bfloat16, device='meta'): built = torch.nn.Linear(2, 2)\n"
    "assert built.weight.is_meta and built.weight.dtype == torch.bfloat16 and torch.ones(1).dtype == torch.float32",
    "from deepspeed.utils import RepeatingLoader; loader = RepeatingLoader([1, 2])\n"
    "assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]",
    "from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader",
    "from deepspeed.utils import instrument_w_nvtx; assert instrument_w_nvtx(len)('ab') == 2",
    "from deepspeed.runtime.utils import see_memory_usage, clip_grad_norm_, get_global_norm, set_random_seed\n"
    "see_memory_usage('after', force=True); assert get_global_norm([3.0, 4.0]) == 5.0; set_random_seed(1)",
    "set_random_seed(2**32 + 1); assert torch.initial_seed() == 2**32 + 1; set_random_seed(2**63 + 1)",
    "assert all(get_global_norm([3.0, bad]) == math.inf for bad in (-1, math.inf, math.nan, torch.tensor(-1.0)))",
    "plain = torch.nn.Parameter(torch.ones(2)); plain.grad = torch.tensor([3.0, 4.0])\n"
    "assert clip_grad_norm_([plain], 1.0, norm_type=2, mpu=None) == 5 and abs(plain.grad.norm() - 1) < 1e-4",
    "from deepspeed.runtime.utils import empty_cache, get_only_unique_item, move_to_device; empty_cache()\n"
    "moved = move_to_device({'a': [torch.ones(1), 2]}, 'meta')\n"
    "assert moved['a'][0].is_meta and get_only_unique_item([1, 1]) == 1\n"
    "assert move_to_device([torch.nn.Linear(2, 2)], 'meta')[0].weight.is_meta",
    "from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler\n"
    "scaler = DynamicLossScaler(init_scale=16, scale_window=1); scaler.update_scale(True)\n"
    "assert scaler.loss_scale == scaler.cur_scale == 8 and LossScaler(4).scale_loss(torch.ones(1)) == 4",
    "torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler])",
    "scaler.cur_scale = 32; assert scaler.loss_scale == 32 and scaler.scale_loss(torch.ones(1)) == 32",
    "taken = pickle.loads(pickle.dumps(scaler)); assert taken.cur_scale == 32 and taken.dynamic",
    # What DeepSpeed's class has pickled: the attributes of its objects.
    "taken = DynamicLossScaler.__new__(DynamicLossScaler)\n"
    "taken.__setstate__({'cur_scale': 8.0, 'dynamic': True, 'cur_iter': 5, 'last_overflow_iter': 3,"
    " 'scale_factor': 2.0, 'scale_window': 2, 'min_scale': 4, 'delayed_shift': 2, 'cur_hysteresis': 2,"
    " 'consecutive_hysteresis': False,"
    " 'raise_error_at_min_scale': False, 'dtype': torch.float16})\n"
    "scales = []\n"
    "for overflow in (True, True, True, True, False, False, False):\n"
    "    taken.update_scale(overflow); scales.append(taken.cur_scale)\n"
    "assert scales == [8, 4, 4, 4, 4, 4, 8], scales",
    "taken = LossScaler.__new__(LossScaler); taken.__setstate__({'cur_scale': 16, 'dynamic': False})\n"
    "assert taken.loss_scale == 16 and not taken.dynamic",
    "scaler = DynamicLossScaler(init_scale=1, raise_error_at_min_scale=False)\n"
    "for _ in range(50): scaler.update_scale(True)",
    "from launcher.base.log import get_logger\n"
    "for dtype in (torch.half, torch.bfloat16):\n"
    "    with unittest.mock.patch.object(get_logger(), 'info') as said:\n"
    "        DynamicLossScaler(init_scale=16, dtype=dtype).update_scale(True)\n"
    "    assert ('reducing to 8' in said.call_args.args[1]) is (dtype == torch.half), said.call_args",
    "from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler\n"
    "made = CreateLossScaler(torch.half, 4, True, {'init_scale': 64, 'delayed_shift': 2})\n"
    "assert made.dynamic and made.cur_scale == 64 and CreateLossScaler(torch.half, 4, False, None).cur_scale == 4\n"
    "assert CreateLossScaler(torch.bfloat16, 4, True, None).cur_scale == 1",
    "from deepspeed.monitor.config import get_monitor_config; from deepspeed.monitor.monitor import MonitorMaster\n"
    "section = {'enabled': True, 'output_path': 'curves', 'job_name': 'job'}\n"
    "monitor = MonitorMaster(get_monitor_config({'csv_monitor': section, 'train_batch_size': 1}))\n"
    "monitor.write_events([('Train/mine', 0.5, 10)]); assert monitor.enabled\n"
    "assert '10,0.5' in open('curves/job/Train_mine.csv').read()",
    "from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile\n"
    "counted = get_model_profile(torch.nn.Linear(4, 8), input_shape=(2, 4), as_string=False, print_profile=False)\n"
    "assert counted == (2 * 2 * 4 * 8, 2 * 4 * 8, 40)",
    # The arguments by their places, as DeepSpeed has them.
    "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))\n"
    "counted = get_model_profile(net, None, [torch.ones(1, 4)], {}, True, False, 1, 2, 0, False, 'places.txt')\n"
    "assert counted[1] == 48 and not net.training and 'FLOPs of step 0' in open('places.txt').read()",
    "profiler = FlopsProfiler(torch.nn.Linear(4, 8)); profiler.start_profile(); profiler.model(torch.ones(2, 4))\n"
    "profiler.ds_engine = engine\n"
    "profiler.stop_profile(); profiler.print_model_profile(output_file='profile.txt')\n"
    "assert 'data parallel size:           1\\n' in open('profile.txt').read()\n"
    "assert profiler.get_total_macs(as_string=True) == '64 MACs' and profiler.get_total_duration() > 0\n"
    "profiler.end_profile(); assert 'Linear' in open('profile.txt').read()",
    "from deepspeed.ops.lamb import FusedLamb; FusedLamb([torch.nn.Parameter(torch.ones(2))], lr=0.1)",
    "from deepspeed.ops.op_builder import CPUAdamBuilder, FusedLambBuilder\n"
    "assert CPUAdamBuilder().is_compatible() and not FusedLambBuilder().is_compatible()",
    "from deepspeed.ops.aio import AsyncIOBuilder; assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME]",
    "from deepspeed.git_version_info import version, git_hash, compatible_ops; assert version == deepspeed.__version__",
    "from deepspeed.env_report import main, cli_main",
    "from deepspeed.utils.groups import get_data_parallel_world_size, get_model_parallel_rank",
    "from deepspeed.moe.layer import MoE; from deepspeed.moe.utils import has_moe_layers, is_moe_param\n"
    "moe = MoE(4, torch.nn.Linear(4, 4), num_experts=2, ep_size=1, k=2, min_capacity=0)\n"
    "output, l_aux, exp_counts = moe(torch.ones(2, 3, 4)); assert output.shape == (2, 3, 4) and l_aux.shape == ()\n"
    "assert exp_counts.sum() == 12 and has_moe_layers(moe) == (True, 2) and moe.num_local_experts == 2\n"
    "assert is_moe_param(moe.deepspeed_moe.experts.deepspeed_experts[0].weight)\n"
    "assert not is_moe_param(moe.deepspeed_moe.gate.wg.weight)",
    "from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer, is_moe_param_group\n"
    "whole = {'params': list(moe.parameters()), 'name': 'all', 'lr': 2.0}\n"
    "two = split_params_into_different_moe_groups_for_optimizer(whole, max_group_size=36)\n"
    "assert [len(g['params']) for g in two] == [1, 3, 1]\n"
    "assert [is_moe_param_group(g) for g in two] == [False, True, True]\n"
    "assert two[1]['name'] == 'ep_size_1' and two[1]['lr'] == 2.0",
    "from deepspeed.utils import groups; assert groups._get_expert_parallel_world_size('ep_size_1') == 1\n"
    "assert groups._get_expert_data_parallel_rank('ep_size_1') == 0 and groups._get_max_expert_size() == 1\n"
    "assert groups._get_expert_data_parallel_group_ranks('ep_size_1') == [0]\n"
    "assert groups.get_tensor_model_parallel_group() is None and groups.get_tensor_model_parallel_src_rank() == 0",
    "from deepspeed.utils import groups; different, same = groups._get_expert_parallel_ranks(16, 2, 4)\n"
    "assert different == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]\n"
    "assert same == [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]]",
    "from deepspeed.runtime.utils import count_used_parameters_in_backward as count; seen = []\n"
    "used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2)); out = used * 2\n"
    "out.register_hook(lambda grad: seen.append(count([used, unused, None]))); out.sum().backward()\n"
    "assert seen == [1]",
    "from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles; seen = []\n"
    "plain = types.SimpleNamespace(wait=lambda: seen.append(0))\n"
    "other = types.SimpleNamespace(wait=lambda **options: seen.append(options))\n"
    "MultipleAllGatherHandles([plain, other]).wait(False); assert seen == [0, {'handle_dependency': False}]",
    "assert deepspeed.__version__ == '.'.join(map(str, (deepspeed.__version_major__, deepspeed.__version_minor__, "
    "deepspeed.__version_patch__)))",
    "from deepspeed.runtime.zero.linear import autocast_custom_fwd, autocast_custom_bwd\n"
    "assert autocast_custom_fwd(print, cast_inputs=None) and callable(autocast_custom_bwd(print))",
    "from deepspeed.utils import logger; section = {'train_batch_size': 1, 'log_level': 'Error'}\n"
    "with unittest.TestCase().assertLogs(logger) as seen:\n"
    "    quiet, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=section)\n"
    "    assert quiet.log_level() == 'Error' and logger.level == 40\n"
    "logger.setLevel('INFO'); own = f'built-in engine of launch {launcher.__version__}'\n"
    "assert f'DeepSpeed info: version={deepspeed.__version__}, answered by the {own}' in seen.output[0]",
    "from deepspeed.runtime.config import get_gradient_clipping, get_log_level\n"
    "from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT, LOG_LEVEL_DEFAULT\n"
    "assert get_gradient_clipping({}) == GRADIENT_CLIPPING_DEFAULT == 1 and get_log_level({}) is LOG_LEVEL_DEFAULT\n"
    "assert get_gradient_clipping({'gradient_clipping': 0}) == 0 and get_log_level({'log_level': 'INFO'}) == 'INFO'",
    "m = torch.nn.Sequential(torch.nn.Linear(2, 2))",
    "assert deepspeed.utils.set_z3_leaf_modules(m, leaf_module_classes=[torch.nn.Linear]) == [m[0]]",
    "from deepspeed.utils import set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix, get_z3_leaf_modules",
    "assert deepspeed.utils.unset_z3_leaf_modules(m, ['Linear']) == [m[0]] and not get_z3_leaf_modules(m)",
    "two = torch.nn.ModuleDict({'a': torch.nn.Linear(2, 2), 'b': torch.nn.Linear(2, 2)})\n"
    "assert set_z3_leaf_modules_by_name(two, ['b', 'a', 'b']) == ([two['b'], two['a']], [])",
    "assert set_z3_leaf_modules_by_name(m, ['0', '7'], raise_if_not_found=False) == ([m[0]], ['7'])",
    "set_z3_leaf_modules_by_suffix(m, ['0'], flag=False); assert get_z3_leaf_modules(m) == []",
    "deepspeed.zero.Init(enabled=False, mem_efficient_linear=True, zero_quantized_weights=False)",
    "from deepspeed.utils import groups; assert groups._get_sequence_parallel_world_size() == 1",
    "from deepspeed.runtime.sequence_parallel import parallel_state_sp as state\n"
    "assert state.get_model_parallel_rank() == 0 and state.get_model_parallel_world_size() == 1",
    "assert groups._get_sequence_parallel_rank() == 0 == groups._get_data_parallel_rank()",
    "from deepspeed.sequence.layer import DistributedAttention",
    "attention = DistributedAttention(lambda q, k, v, scale: scale * q, None, 2, 0)\n"
    "assert torch.equal(attention(*[torch.ones(2, 1, 2, 2)] * 3, 1, None, scale=2), 2 * torch.ones(2, 1, 2, 2))",
    "from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy",
    "from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter",
    "assert UlyssesSPAttentionHF.register_with_transformers('a/model', 'sdpa', 1, 1) is None",
    "from deepspeed.runtime.sequence_parallel import parallel_state_sp\n"
    "assert parallel_state_sp.get_sequence_parallel_world_size() == 1",
    "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint",
    "from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME as name; assert name == '.deepspeed_env'",
    "from deepspeed.checkpoint.utils import clone_tensors_for_torch_save as clone",
    "whole = torch.arange(4.0); part = whole[:2]\ncopy = clone(collections.OrderedDict(a=part, b=[part, 3]))\n"
    "assert type(copy) is collections.OrderedDict and copy['a'].tolist() == [0, 1] and copy['b'][0] is copy['a']\n"
    "assert copy['a'].untyped_storage().nbytes() == 8 and copy['a'] is not part",
    "deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(['--deepspeed', 'c.json'])",
    # ---- the engine ----
    "assert isinstance(engine, torch.nn.Module) and isinstance(engine, deepspeed.DeepSpeedEngine)",
    "assert engine.module is model and engine._modules and list(engine.modules()) and list(engine.named_parameters())",
    "assert engine.config is not None and engine.config.get('zero_optimization', {}).get('stage') == 3",
    "assert engine.device == torch.device('cpu') and engine.train() is engine and engine.eval() is engine",
    "engine.train(); engine.set_gradient_accumulation_boundary(is_boundary=True)",
    "engine.backward(engine(torch.ones(2, 4)).sum(), scale_wrt_gas=False)",
    "before = deepspeed.utils.safe_get_full_grad(model.weight)\n"
    "deepspeed.utils.safe_update_full_grad_vectorized([model.weight, p], lambda grad, param: grad / 2)\n"
    "assert torch.equal(deepspeed.utils.safe_get_full_grad(model.weight), before / 2); engine.step()",
    "assert engine.get_global_grad_norm() > 0 and engine.global_steps == 1; engine.zero_grad()",
    "assert 'exclude_frozen_parameters' in inspect.signature(engine.save_checkpoint).parameters",
    "assert {'load_module_strict', 'load_optimizer_states', 'load_lr_scheduler_states'} <= "
    "set(inspect.signature(engine.load_checkpoint).parameters)",
    "assert engine.get_batch_info() == (2, 2, 1) and engine.was_step_applied() and engine.get_mom() == [(0.9, 0.999)]",
    "assert engine.zero_optimization() and engine.zero_optimization_partition_weights(); engine.zero_cpu_offload()",
    "assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.gradient_clipping()) == (False, False, 1.0)",
    "assert engine.zero_reduce_bucket_size() == 500_000_000 and engine.wall_clock_breakdown() is False",
    "assert engine.zero_overlap_comm() in (None, True) and engine.fp16_enabled.__doc__ == "
    "'Return `fp16.enabled` of the config in force.'",
    "for name in engine_getters: getattr(engine, name)()",
    "assert engine.get_data_types() == (torch.float32, torch.float32) and engine.dp_world_size == 1",
    "assert engine.optimizer_name() == 'adamw' and engine.optimizer_params()['lr'] == 0.1",
    "assert engine.scheduler_name() is None and engine.scheduler_params() is None",
    "assert engine.get_sequence_parallel_rank() == 0 and engine.sequence_parallel_size == 1",
    "assert engine.get_data_parallel_rank() == 0 == engine.get_model_parallel_rank() and engine.mp_world_size == 1",
    "engine.allreduce_gradients(); assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (2, 1)",
    "assert [batch.shape for batch in engine.deepspeed_io(torch.ones(4, 4))] == [(2, 4), (2, 4)]",
    "state = engine.module_state_dict(); assert state['weight'].shape == (1, 4)",
    "engine.load_module_state_dict({'module': state}); assert engine.save_fp16_model('whole', 'model.bin')",
    "assert engine.local_rank == 0 and engine.get_lr() == [0.1] and engine.micro_steps == 1",
    "assert engine.is_gradient_accumulation_boundary()",
    "assert engine.loss_scale() == 1.0 == optimizer.cur_scale and engine.global_samples == 2",
    "engine.save_checkpoint('saved', 'pytorch_model'); assert engine.load_checkpoint('saved', 'pytorch_model')[0]",
    "assert engine.zero_gather_16bit_weights_on_model_save() is True",
    "assert engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)['weight'].shape == (1, 4)",
    "state = engine._consolidated_16bit_state_dict(); assert state['weight'].shape == (1, 4) and len(state) == 2",
    "engine.compile(backend='eager', compile_kwargs={'dynamic': False}); engine(torch.ones(2, 4))",
    "assert model._compiled_call_impl is not None and engine._compiled_call_impl is None",
    "assert engine.in_features == 4  # the model's",
    # ---- what comes with it ----
    "assert optimizer.param_groups[0]['lr'] == 0.1 and optimizer.overflow is False and optimizer.optimizer is not None",
    "assert 'lr' in optimizer.defaults and optimizer.state is not None",
    "optimizer.load_state_dict(optimizer.state_dict())",
    "assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) and scheduler.get_last_lr() == [0.1]",
    "scheduler.load_state_dict(scheduler.state_dict())",
    "engine.destroy()",
]
# Statement -> the error's class, and words of it.
REFUSED = {
    "PartitionedTensor.from_meta(torch.tensor([1, 4, 2, 1, 0, 2, 4]), torch.ones(2), None)": (
        "EngineError",
        "the part is number 1 of 2, and this rank number 0 of 1",
    ),
    "SynchronizedWallClockTimer()('a').stop()": ("EngineError", "was not started"),
    "required_torch_version()": ("AssertionError", "needs min_version or max_version"),
    "from deepspeed.utils import pin_memory": ("ImportError", "call tensor.pin_memory()"),
    "deepspeed.runtime.utils.register_output_backward_hooks": ("AttributeError", "call tensor.register_hook()"),
    "deepspeed.accelerator.set_accelerator(torch)": ("EngineError", "derive it from DeepSpeedAccelerator"),
    "deepspeed.accelerator.set_accelerator(on_gpu)": ("EngineError", "the device is cuda, and ranks train on cpu"),
    "a.set_compile_backend('no_such')": ("EngineError", 'torch.compile has no backend "no_such"'),
    "deepspeed.ops.op_builder.InferenceBuilder().load()": ("EngineError", "no such kernel"),
    "engine.no_such_name": (
        "AttributeError",
        "neither Engine nor the model in it, Linear, has an attribute 'no_such_name'",
    ),
    "deepspeed.no_such_name": ("AttributeError", "the built-in engine of launch"),
    "import deepspeed.no_such_module": ("ModuleNotFoundError", "deepspeed.no_such_module"),
    "import deepspeed.runtime.pipe.p2p": ("ImportError", "call engine.train_batch()"),
    "from deepspeed.runtime.pipe.schedule import TrainSchedule": ("ImportError", 'give "schedule" in "pipeline"'),
    "from deepspeed.runtime.zero.offload_states import get_state_devices": (
        "ImportError",
        "call engine.offload_states()",
    ),
    "deepspeed.moe.layer.MoE(8, m[0], num_experts=2, use_tutel=True)": ("EngineError", "Tutel"),
    "from deepspeed.runtime.utils import count_used_parameters_in_backward as count; count([])": (
        "EngineRuntimeError",
        "no backward runs",
    ),
    "groups._create_expert_and_data_parallel(2)": ("EngineAssertionError", "1 ranks cannot be divided"),
    "groups._create_expert_and_data_parallel(1, True)": ("EngineAssertionError", "are not neighbours"),
    "groups._get_expert_parallel_group('ep_size_4')": ("EngineAssertionError", "no group of experts ep_size_4"),
    "from deepspeed.compression.compress import init_compression": ("ImportError", "use torch.ao.quantization"),
    "from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset": (
        "ImportError",
        "no curriculum learning",
    ),
    "from deepspeed.checkpoint.ds_to_universal import main": ("ImportError", "loads at any number of ranks"),
    "from deepspeed.sequence.fpdt_layer import FPDT_Attention": ("ImportError", "no FPDT or AutoSP"),
    "import deepspeed.autotuning": ("ImportError", 'no autotuner in Python: call "launch estimate", or install'),
    "import deepspeed.module_inject": (
        "ImportError",
        "no kernels to inject",
    ),
    "import deepspeed.nvme": ("ImportError", 'no disk benchmark in Python: call "launch io", or install'),
    "import deepspeed.io": ("ImportError", "no disk writers for scripts: call engine.save_checkpoint(), or install"),
    "import deepspeed.checkpoint.universal_checkpoint": ("ImportError", "loads at any number of ranks"),
    "import deepspeed.inference": ("ImportError", "no inference kernels"),
    "deepspeed.tp_model_init(model=model, tp_size=2, dtype=torch.float32, config={})": (
        "EngineError",
        "tp_size 2 does not divide the 1 ranks of this job",
    ),
    "deepspeed.init_inference(model)": ("EngineError", "no inference kernels"),
    "deepspeed.utils.groups._get_sequence_parallel_group()": ("EngineKeyError", "no group of sequence parallelism"),
    "deepspeed.ops.adam.FusedAdam([p], bias_correction=False)": ("EngineError", "bias_correction"),
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad([p], adamw_mode=True)": ("EngineError", "no decoupled weight decay"),
    "set_z3_leaf_modules_by_name(m, ['7'])": ("EngineValueError", "no module named 7"),
    "deepspeed.zero.Init(zero_quantized_weights=True)": ("EngineError", "zero_quantized_weights"),
    "engine.get_sequence_parallel_group()": ("EngineKeyError", "no group of sequence parallelism"),
    "engine.load_module_state_dict({}, custom_load_fn=print)": ("EngineError", "custom_load_fn"),
    "deepspeed.PipelineModule(layers=[], num_stages=2)": ("EngineError", "needs at least one layer"),
    "deepspeed.InferenceEngine(model)": ("EngineError", "no inference kernels"),
    "CPUAdamBuilder().load()": ("EngineError", "is part of the engine"),
    "FusedLamb([p], amsgrad=True)": ("EngineError", "amsgrad"),
    "FlopsProfiler(model).start_profile(ignore_list=[torch.nn.Linear])": ("EngineError", "ignore_list"),
    "get_model_profile(model, mode='train')": ("EngineError", 'mode="train"'),
    "get_model_profile(model, (1, 4), ignore_modules=[torch.nn.Linear])": ("EngineError", "ignore_modules"),
    "get_model_profile(model)": ("EngineError", "no arguments for the model"),
    "clip_grad_norm_([p], 1.0, mpu=3)": ("EngineError", "mpu=..."),
    "DynamicLossScaler(init_scale=1).update_scale(True)": ("EngineError", "gradients overflowed in 1 step; use bf16"),
    "CreateLossScaler(torch.half, 1, True, None)": ("EngineError", "dynamic_loss_args"),
    "a.pin_memory(torch.ones(4), align_bytes=2**40)": ("EngineError", "not aligned to"),
    "set_log_level_from_string('loud')": ("EngineValueError", "unknown log level"),
    "DeepSpeedConfig({'train_batch_size': 1, 'no_such_key': 1})": ("ConfigError", "no_such_key"),
    "get_only_unique_item([1, 2])": ("RuntimeError", "one value was expected"),
    "deepspeed.initialize(model=model, config={}, mpu=3)": ("EngineError", "mpu"),
    "engine.compile(schedule=[])": ("EngineError", "schedule"),
}
RUN = """
import launcher.compat; launcher.compat.install()
import argparse, collections, contextlib, datetime, importlib.metadata, inspect, io, json, math, os, pickle, sys, time
import types, unittest, unittest.mock
import deepspeed, launcher, torch

deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
config = {
    "train_micro_batch_size_per_gpu": 2, "steps_per_print": float("inf"), "fp16": {"enabled": False},
    "comms_logger": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {
        "stage": 3, "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "none", "nvme_path": None},
    },
}
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model, config_params=config, model_parameters=(p for p in model.parameters()),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
)
from launcher.engine.deepspeed_engine import _GETTERS as engine_getters
names, found = globals(), {}
for statement in json.load(open("statements.json")):
    try:
        exec(statement, names)
        found[statement] = None
    except Exception as error:
        found[statement] = [type(error).__name__, str(error)]
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each statement has raised."""
    folder = tmp_path_factory.mktemp("surface")
    *before_the_end, the_end = WORKS
    (folder / "statements.json").write_text(json.dumps([*before_the_end, *REFUSED, the_end]))
    result = run_ranks(folder, 0, write(folder, RUN), env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 0, result.err
    loaded: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return loaded


def test_each_refusal_of_a_module_says_what_to_use() -> None:
    assert [path for path, sentence in REFUSED_MODULES.items() if ": " not in sentence or sentence.endswith(".")] == []


@pytest.mark.parametrize("statement", WORKS)
def test_it_works(found: dict[str, Any], statement: str) -> None:
    assert found[statement] is None


@pytest.mark.parametrize("statement", REFUSED)
def test_it_is_refused_in_one_sentence(found: dict[str, Any], statement: str) -> None:
    kind, words = REFUSED[statement]
    assert found[statement] is not None
    assert found[statement][0] == kind
    assert words in found[statement][1]
