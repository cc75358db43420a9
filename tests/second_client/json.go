package main

// Strict JSON and canonical JSON: PROTOCOL.md, section 3. Integers are int64, other numbers float64.

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"
)

type object = map[string]any

// refusal is a rule of the protocol that an input breaks, with its name (section 13). It travels as a panic.
type refusal struct{ code, detail string }

func refuse(code, format string, args ...any) { panic(refusal{code, fmt.Sprintf(format, args...)}) }

func need(holds bool, code, format string, args ...any) {
	if !holds {
		refuse(code, format, args...)
	}
}

func attempt(work func()) (refused *refusal) {
	defer func() {
		switch e := recover().(type) {
		case nil:
		case refusal:
			refused = &e
		default: // a value that the checks let through: it is refused, and does not end the client
			refused = &refusal{"internal", fmt.Sprint(e)}
		}
	}()
	work()
	return
}

func readJSON(text []byte) any {
	need(utf8.Valid(text) && json.Valid(text) && !loneSurrogate(text), "bad_json", "not strict JSON")
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	return readValue(decoder, 0)
}

func readObject(text []byte) object {
	value, ok := readJSON(text).(object)
	need(ok, "bad_json", "not an object")
	return value
}

func readValue(decoder *json.Decoder, depth int) any {
	token, _ := decoder.Token() // json.Valid has read the whole text
	switch token := token.(type) {
	case json.Number:
		return readNumber(token.String())
	case json.Delim:
		need(depth < 8, "bad_json", "too many containers inside each other")
		list, fields := []any{}, object{}
		for decoder.More() {
			if token == '[' {
				list = append(list, readValue(decoder, depth+1))
				continue
			}
			name, _ := decoder.Token()
			_, twice := fields[name.(string)]
			need(!twice, "bad_json", "a key twice")
			fields[name.(string)] = readValue(decoder, depth+1)
		}
		decoder.Token()
		if token == '[' {
			return list
		}
		return fields
	}
	return token
}

func readNumber(text string) any {
	if strings.ContainsAny(text, ".eE") {
		value, err := strconv.ParseFloat(text, 64)
		need(err == nil, "bad_json", "a number overflows")
		return value
	}
	value, err := strconv.ParseInt(text, 10, 64)
	need(err == nil && value < 1<<53 && value > -(1<<53), "bad_json", "an integer is too large")
	return value
}

func loneSurrogate(text []byte) bool {
	high := false // the escape before was the first half of a pair
	for i := 0; i < len(text); i++ {
		code := uint64(0)
		if text[i] == '\\' && text[i+1] == 'u' {
			code, _ = strconv.ParseUint(string(text[i+2:i+6]), 16, 32)
			i += 5
		} else if text[i] == '\\' {
			i++
		}
		low := code >= 0xDC00 && code < 0xE000
		if high != low {
			return true
		}
		high = code >= 0xD800 && code < 0xDC00
	}
	return high
}

func writeJSON(value any) []byte {
	var out bytes.Buffer
	writeValue(&out, value)
	return out.Bytes()
}

func writeValue(out *bytes.Buffer, value any) {
	switch value := value.(type) {
	case object:
		names := make([]string, 0, len(value))
		for name := range value {
			names = append(names, name)
		}
		sort.Strings(names)
		for i, name := range names {
			out.WriteByte("{,"[min(i, 1)])
			writeString(out, name)
			out.WriteByte(':')
			writeValue(out, value[name])
		}
		if len(names) == 0 {
			out.WriteByte('{')
		}
		out.WriteByte('}')
	case []any:
		out.WriteByte('[')
		for i, one := range value {
			if i > 0 {
				out.WriteByte(',')
			}
			writeValue(out, one)
		}
		out.WriteByte(']')
	case string:
		writeString(out, value)
	case float64:
		text := strconv.FormatFloat(value, 'g', -1, 64)
		if value == math.Trunc(value) && !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		out.WriteString(text)
	case nil:
		out.WriteString("null")
	default: // int, int64, bool
		fmt.Fprint(out, value)
	}
}

func writeString(out *bytes.Buffer, text string) {
	out.WriteByte('"')
	for _, r := range text {
		switch {
		case r == '"' || r == '\\':
			out.WriteByte('\\')
			out.WriteRune(r)
		case strings.ContainsRune("\b\f\n\r\t", r):
			out.WriteString(`\` + string("bfnrt"[strings.IndexRune("\b\f\n\r\t", r)]))
		case r < ' ':
			fmt.Fprintf(out, `\u%04x`, r)
		default:
			out.WriteRune(r)
		}
	}
	out.WriteByte('"')
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}
