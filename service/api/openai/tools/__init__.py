"""Tools in chats: functions that a model may call, its choice among them, and its calls read from text."""
