"""Names that tools of the desk were known by elsewhere, so that tasks which still use them are told of ours."""

from collections.abc import Mapping


EARLIER_TOOL_NAMES: Mapping[str, str] = {
    "send_slack_message": "slack_post_message",
    "tavily_qna_search": "tavily_qna",
}
"""Tools of the desk by the names that earlier tasks and servers of the same vendors have for them."""
