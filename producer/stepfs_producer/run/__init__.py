"""A running plan: `conductor` plans, `loading` brings samples in, `building` turns step plans into payloads."""
