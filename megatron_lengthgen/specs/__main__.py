"""List the layer specs that can be named on Megatron's command line: ``python -m megatron_lengthgen.specs``."""

from megatron_lengthgen import specs

__all__ = ["describe", "main"]

_USE = """
--spec megatron_lengthgen.specs NAME    selects one in any script that takes Megatron's arguments;
                                        hybrid names go with --hybrid-layer-pattern, gpt names without
--hidden-dropout P                      sets p, and drops the embedding's output too;
                                        write --attention-dropout 0 as well, a layer spec cannot switch that off
"""


def describe() -> dict[str, str]:
    """What each named spec does, one line each; a hybrid spec is its GPT namesake in another kind of model."""
    lines = {}
    for name in specs.__all__:
        kind, _, rest = name.partition("_")
        if kind in ("gpt", "hybrid"):
            lines[name] = (getattr(specs, f"gpt_{rest}").__doc__ or "").strip().splitlines()[0].replace("``", "")
    return lines


def main() -> None:
    """Print the specs and how to select one."""
    lines = describe()
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name.ljust(width)}  {text}")
    print(_USE, end="")


if __name__ == "__main__":
    main()
