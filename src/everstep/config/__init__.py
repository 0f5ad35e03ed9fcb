"""Options: everything that a user can choose, validated once.

Read ``options`` first; users import its names from ``everstep.options``. ``method`` has the
presets, ``intervals`` parses intervals, ``given`` checks names, types and numbers.
"""
