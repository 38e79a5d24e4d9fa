"""Families whose outcome is a message in the right place."""

from typing import Any

from mcp_grpo.desk.servers.slack.workspace import Channel, Message
from mcp_grpo.desk.tasks.drafts import SLACK, Draft, Pick, Step, Unsuitable, exact, person, step
from mcp_grpo.desk.tasks.figures import Figure, statement_figure
from mcp_grpo.desk.world.records import Company


EUROPE = ("LSE", "XETRA")
HISTORY = 50
REACTIONS = ("eyes", "white_check_mark", "thumbsup", "memo")


def report(pick: Pick) -> Draft:
    """Draft a task to post a figure in the right channel, in a given form."""
    company = pick.company()
    figure = statement_figure(pick, company)
    kind = pick.random.randrange(2)
    if kind == 0:
        name = "earnings-eu" if company.exchange in EUROPE else "earnings"
        where = "in the channel for results of companies like it"
    else:
        name, where = "data-quality", "in the channel about wrong or restated figures"
    channel = _channel(pick, name)
    value, currency = figure.text.split()
    what = figure.name.replace(" in fiscal ", " FY")
    text = f"{company.symbol} {what}: {value} {currency}"
    return Draft(
        question=f"Look up the {figure.name} of {company.name} and post it {where}, as one message of exactly this form: "
        f"`{company.symbol} {what}: <whole number without separators> {currency}`. Then say that it is done.",
        expected_state={SLACK: {"added": [{"kind": "post", "channel": channel.name, "text": text}]}},
        steps=[
            Step(
                calls=(*figure.step.calls, ("slack_list_channels", {})),
                evidence=(*figure.step.evidence, f'"{channel.id}"'),
            ),
            step(("slack_post_message", {"channel_id": channel.id, "text": text}), evidence=['"ok":true']),
        ],
        final=f"Done: posted in #{channel.name}.",
        symbols=(company.symbol,),
    )


def thread(pick: Pick) -> Draft:
    """Draft a task to give a figure in the thread where somebody asked about the company."""
    question, channel, company = _question(pick)
    figure = _asked(pick, company)
    asker = pick.world.workspace.user(question.user_id)
    assert asker is not None
    text = f"{company.short_name}: {figure.name} is {figure.text}"
    state = {"kind": "reply", "channel": channel.name, "thread_ts": question.ts, "text": {"only": [figure.answer]}}
    return Draft(
        question=f"In #{channel.name}, {asker.real_name} asked something about {company.short_name}. Reply in that thread with "
        f"the {figure.name} of {company.short_name}, and no other figure. Then say that it is done.",
        expected_state={SLACK: {"added": [state]}},
        steps=[
            step(
                ("slack_list_channels", {}),
                ("slack_get_users", {}),
                ("searchName", {"query": company.short_name}),
                evidence=[f'"{channel.id}"', f'"{asker.id}"', f'"{company.symbol}"'],
            ),
            Step(
                calls=(
                    ("slack_get_channel_history", {"channel_id": channel.id, "limit": HISTORY}),
                    *figure.step.calls,
                ),
                evidence=(f'"{question.ts}"', *figure.step.evidence),
            ),
            step(
                ("slack_reply_to_thread", {"channel_id": channel.id, "thread_ts": question.ts, "text": text}),
                evidence=['"ok":true'],
            ),
        ],
        final="Done: replied in the thread.",
        symbols=(company.symbol,),
    )


def reaction(pick: Pick) -> Draft:
    """Draft a task to react to the right message."""
    question, channel, company = _question(pick)
    asker = pick.world.workspace.user(question.user_id)
    assert asker is not None
    emoji = pick.one(REACTIONS)
    state = {"kind": "reaction", "channel": channel.name, "ts": question.ts, "reaction": emoji}
    if any(emoji == reaction.name for reaction in question.reactions):
        raise Unsuitable
    return Draft(
        question=f"In #{channel.name}, {asker.real_name} asked something about {company.short_name}. Mark that message with "
        f":{emoji}: and write nothing. Then say that it is done.",
        expected_state={SLACK: {"added": [state]}},
        steps=[
            step(("slack_list_channels", {}), ("slack_get_users", {}), evidence=[f'"{channel.id}"', f'"{asker.id}"']),
            step(
                ("slack_get_channel_history", {"channel_id": channel.id, "limit": HISTORY}),
                evidence=[f'"{question.ts}"'],
            ),
            step(
                ("slack_add_reaction", {"channel_id": channel.id, "timestamp": question.ts, "reaction": emoji}),
                evidence=['"ok":true'],
            ),
        ],
        final="Done: marked.",
        symbols=(company.symbol,),
    )


def _channel(pick: Pick, name: str) -> Channel:
    channel = pick.world.workspace.channel(name)
    if channel is None or channel.is_archived or not channel.is_member:
        raise Unsuitable
    return channel


def _question(pick: Pick) -> tuple[Message, Channel, Company]:
    """Pick a question about a company of this split, in a channel where a reply is possible."""
    one_class = pick.companies(lambda company: not company.share_class)
    by_name = {company.short_name: company for company in one_class}
    threads = [thread.parent for thread in pick.world.workspace.threads if thread.parent.company in by_name]
    question = pick.one(threads)
    channel = pick.world.workspace.channel(question.channel_id)
    assert channel is not None
    return question, _channel(pick, channel.name), by_name[str(question.company)]


def _asked(pick: Pick, company: Company) -> Figure:
    """Pick a figure for a reply that nobody would guess."""
    quote = pick.world.market.quote(company.symbol)
    figures: list[Any] = [
        statement_figure(pick, company),
        Figure(
            name="latest share price",
            answer=exact(quote.price / 100, company.currency),
            text=f"{quote.price / 100:.2f} {company.currency}",
            step=step(("getQuote", {"symbol": company.symbol}), evidence=[f'"price":{quote.price / 100!r}']),
        ),
        Figure(
            name="chief executive",
            answer=person(company.ceo),
            text=company.ceo,
            step=step(("getCompanyProfile", {"symbol": company.symbol}), evidence=[f'"ceo":"{company.ceo}"']),
        ),
    ]
    return pick.one(figures)
