"""Texts and tokens: templates of chats and answers, and grammars that answers follow."""
