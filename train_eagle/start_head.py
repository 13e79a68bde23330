"""The head that a training run starts from: another run's, or one in a folder, such as the one that is served."""

from pathlib import Path

from specdec.draft_heads.formats.head_kind import Source
from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.train_eagle.head_export import from_folder
from specdec.train_eagle.training_state import saved_run


def begin_with(head: FeatureHead, start: Path, target: Path) -> None:
    """Copy the weights of another head into a fresh one, the tokens that it proposes included.

    Args:
        start: the folder of a run's state (OUT/run), or of a head.
        target: the target's checkpoint.

    Raises:
        ValueError: there is no head, or one of another kind or other sizes.
    """
    saved = saved_run(start)
    if saved is None:
        _begin_with_folder(head, start, target)
        return
    try:
        head.load_state_dict(saved.head())
    except RuntimeError as error:
        raise ValueError(f"{start}: its head does not fit: {str(error).splitlines()[1].strip()}") from None


def _begin_with_folder(head: FeatureHead, folder: Path, target: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: holds no head; start names the folder of a head, or of a run, OUT/run")
    kind, given, *_ = from_folder(folder, target)
    if type(given) is not type(head):
        raise ValueError(
            f"{folder}: an {kind.files.label} head, which is another kind than this run's; give its --head"
        )
    if any(given.windows):
        raise ValueError(
            f"{folder}: its layers have a sliding window, and heads are trained without one; start from another head, "
            "and serve it with draft_window_size"
        )
    # Shapes alone would not tell which layers it reads, nor by which norms.
    own, wanted = (kind.files.official(one)[0] for one in (given, head))
    if different := [name for name in (own | wanted) if own.get(name) != wanted.get(name)]:
        name = different[0]
        sizes = f"its {name} is {own.get(name)}, and this run's {wanted.get(name)}"
        raise ValueError(f"{folder}: {sizes}; give the run the sizes of the head that it starts from")
    tensors = given.state_dict()
    if describe_folder(folder).embedding != Source.FILE:
        # The target's, which the fresh head has.
        del tensors["embed_tokens.weight"]
    head.load_state_dict(tensors, strict=False)
