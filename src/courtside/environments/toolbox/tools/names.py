"""What each tool may be called. The first of the seen names is the common one.

A name belongs to one capability only, so a name that an episode does not list is never found there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    seen_names: tuple[str, ...]
    held_out: tuple[str, ...]
    """Never listed in training with `names = "seen"`."""

    @property
    def common(self) -> str:
        return self.seen_names[0]


def _names(seen_names: str, held_out: str) -> Names:
    return Names(tuple(seen_names.split()), tuple(held_out.split()))


NAMES: Mapping[str, Names] = {
    "weather": _names(
        "get_weather weather meteo weather_lookup city_weather",
        "sky_report current_conditions climate_now",
    ),
    "calculate": _names(
        "calculator calc math_eval compute evaluate",
        "arithmetic do_math solve_sum",
    ),
    "convert": _names(
        "convert_units unit_converter convert units to_unit",
        "change_measure measure_swap unit_exchange",
    ),
    "days_between": _names(
        "days_between date_diff count_days day_difference date_gap",
        "elapsed_days calendar_span days_apart",
    ),
    "contact": _names(
        "find_contact contacts phone_lookup phone_book get_phone",
        "directory who_is dial_search",
    ),
    "price": _names(
        "get_price price price_check cost_of item_price",
        "catalog_entry how_much shop_quote",
    ),
    "write_note": _names(
        "write_note save_note create_note note_write new_note",
        "jot_down store_memo put_text",
    ),
    "read_note": _names(
        "read_note get_note open_note note_read show_note",
        "recall_memo fetch_text view_entry",
    ),
    "weekday": _names(
        "get_weekday weekday day_of_week which_day day_name",
        "calendar_day name_of_date week_position",
    ),
    "add_days": _names(
        "add_days date_add shift_date plus_days move_date",
        "later_date calendar_offset date_after",
    ),
    "append_note": _names(
        "append_note add_to_note note_append extend_note note_add",
        "attach_text grow_memo continue_entry",
    ),
    "list_notes": _names(
        "list_notes notes all_notes note_index show_notes",
        "memo_overview entry_titles what_is_stored",
    ),
    "delete_note": _names(
        "delete_note remove_note note_delete drop_note erase_note",
        "discard_memo clear_entry throw_away",
    ),
    "count_words": _names(
        "count_words word_count words num_words word_counter",
        "text_size tally how_many_words",
    ),
    "reverse_text": _names(
        "reverse_text reverse flip_text text_reverse backwards",
        "mirror_letters turn_around invert_string",
    ),
    "upper_case": _names(
        "to_upper uppercase upper make_upper capitals",
        "shout_text big_letters raise_case",
    ),
}

_FIRST = (
    "amber basalt birch brass cedar cinder cobalt copper coral crimson dusty ember fern flint "
    "frost golden granite hazel indigo ivory jade juniper lilac linen maple marble mossy ochre "
    "olive onyx pearl pine plum quartz rust saffron sandy silver slate velvet"
)
_SECOND = (
    "anchor arch badger barrel beacon bell bridge candle canyon compass crane delta engine falcon "
    "garden hammer harbor island kettle ladder lantern meadow mirror needle orchard otter paddle "
    "piano rocket saddle sparrow spindle summit teapot tunnel valley violin wagon willow window"
)
INVENTED_NAMES = tuple(
    f"{first}_{second}" for first in _FIRST.split() for second in _SECOND.split()
)
"""Names without meaning: only the list tells which tool they name."""
