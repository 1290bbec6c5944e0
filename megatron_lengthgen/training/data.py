"""Megatron's blended GPT datasets for ``megatron.training.pretrain``."""

from collections.abc import Callable
from typing import Any

__all__ = ["train_valid_test_datasets", "validation_dataset"]


def train_valid_test_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The dataset provider that ``pretrain()`` calls on every rank.

    Args:
        num_samples: sequences wanted for training, validation and test.
        vp_stage: virtual pipeline stage, if any.

    Returns:
        The three ``GPTDataset`` blends; ``None`` where a split is empty, or where this rank reads no data.
    """
    from megatron.core import mpu
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    def is_built_here() -> bool:
        return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    return _build(_config(get_args().seq_length), num_samples, is_built_here)


def validation_dataset(sequence_length: int, samples: int) -> Any:
    """The validation split in sequences of another length, without masks between documents; all ranks call this.

    Returns:
        ``GPTDataset`` or a blend of them with ``samples`` sequences; ``None`` where the split is empty, and on pipeline
        stages that read no data.
    """
    from megatron.training.utils import is_first_or_last_pipeline_stage

    config = _config(sequence_length)
    config.reset_attention_mask = config.create_attention_mask = False
    # Only the second of the three splits, whichever way they are given.
    if config.split_matrix is not None:
        config.split_matrix = [None, config.split_matrix[1], None]
    if config.blend_per_split is not None:
        config.blend_per_split = [None, config.blend_per_split[1], None]
    return _build(config, [0, samples, 0], lambda: is_first_or_last_pipeline_stage(None))[1]


def _config(sequence_length: int) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=sequence_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )


def _build(config: Any, num_samples: list[int], is_built_here: Callable[[], bool]) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
    from megatron.training import get_args

    dataset = MockGPTDataset if get_args().mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, is_built_here, config).build()


# Every rank calls the builder, whose barrier spans all of them; `is_built_here` decides who reads the files.
setattr(train_valid_test_datasets, "is_distributed", True)  # noqa: B010 (a type checker knows no such attribute)
