"""Back from the steps of a lake to what made them: records and their texts, the steps of a record, a replay."""
