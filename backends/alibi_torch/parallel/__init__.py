"""ALiBi attention on several processes: one sequence divided among them, or the heads of a layer.

Because ALiBi's bias falls without bound, a shard of the sequence needs only the tokens of other shards that are within
the horizon of each head. Processes exchange the keys and values of these tokens, and return their gradients. ::

    from alibi_torch import parallel

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tokens"))
    result = parallel.attention(query, key, value, group=mesh, axis_name="tokens")

    parallelize_module(model, mesh["heads"], parallel.tensor_parallel_plan(model))
"""

from alibi_torch.parallel._attention import attention
from alibi_torch.parallel._tensor import TensorParallelAttention, tensor_parallel_plan

__all__ = ["TensorParallelAttention", "attention", "tensor_parallel_plan"]
