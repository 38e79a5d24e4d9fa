"""Where a turn stops thinking."""

from mcp_grpo.rollout.formats.spelling import Spelling, spelled


REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))


class Reasoning:
    """
    Tells the reasoning of a turn from what follows it.

    Args:
        spelling (`Spelling`):
            How turns are spelled.
        header (`str`):
            What stands before a turn, spelled. Some templates open the reasoning there.
    """

    def __init__(self, spelling: Spelling, header: str) -> None:
        self._header = header
        # As a control token, or written out in letters.
        self._openings, self._endings = (
            {spell(tag) for tag in tags for spell in (spelling.text, spelled)}
            for tags in zip(*REASONING_TAGS, strict=True)
        )

    @property
    def is_open(self) -> bool:
        """Whether a turn begins in the midst of it."""
        return self.end(" ") > 0

    def end(self, text: str) -> int:
        """
        Where the reasoning of a turn ends.

        Args:
            text (`str`):
                The turn, spelled.

        Returns:
            `int`: The place after its last reasoning; 0 if there is none, the length of the turn if it does not end.
        """
        text = self._header + text
        end = max((text.rfind(ending) + len(ending) for ending in self._endings if ending in text), default=0)
        if any(text.find(opening, end) >= 0 for opening in self._openings):
            end = len(text)
        return max(0, end - len(self._header))
