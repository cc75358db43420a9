package main

// Tensor files, the codecs f32 (both ways) and i8 (written), and schemas: section 6. A model is a flat vector of
// float64 that hold float32 numbers.

import (
	"bytes"
	"encoding/binary"
	"math"
	"sort"
)

type row struct {
	name, role string
	shape      []int
}

func (r row) size() int { return product(r.shape) }

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

type schema []row // in the order of the flat vector

func (s schema) size() (n int) {
	for _, r := range s {
		n += r.size()
	}
	return
}

func (s schema) sha() string {
	rows := []any{}
	sorted := append(schema{}, s...)
	sort.Slice(sorted, func(i, j int) bool { return sorted[i].name < sorted[j].name })
	for _, r := range sorted {
		rows = append(rows, []any{r.name, r.role, toAny(r.shape)})
	}
	return sha256Of(writeJSON(rows))
}

func toAny[T any](list []T) []any {
	out := make([]any, len(list))
	for i, one := range list {
		out[i] = one
	}
	return out
}

type tensor struct {
	name, dtype string // F64, F32 or I64
	shape       []int
	values      []float64
}

var itemSize = map[string]int{"F64": 8, "F32": 4, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}

// writeTensors makes a tensor file; the largest items come first, so that every tensor begins at a multiple of its item size.
func writeTensors(kind, codec, schemaSha, base string, tensors []tensor) []byte {
	meta := object{"codec": codec, "kind": kind, "schema": schemaSha, "v": 1}
	if base != "" {
		meta["base"] = base
	}
	header := object{"__metadata__": object{"fc": string(writeJSON(meta))}}
	sort.SliceStable(tensors, func(i, j int) bool { return itemSize[tensors[i].dtype] > itemSize[tensors[j].dtype] })
	var data bytes.Buffer
	for _, t := range tensors {
		begin := data.Len()
		for _, v := range t.values {
			switch t.dtype {
			case "F64":
				binary.Write(&data, binary.LittleEndian, v)
			case "F32":
				binary.Write(&data, binary.LittleEndian, float32(v))
			case "I64":
				binary.Write(&data, binary.LittleEndian, int64(v))
			case "I8":
				data.WriteByte(byte(int8(v)))
			}
		}
		header[t.name] = object{"dtype": t.dtype, "shape": toAny(t.shape), "data_offsets": []any{begin, data.Len()}}
	}
	text := writeJSON(header)
	text = append(text, bytes.Repeat([]byte(" "), (8-len(text)%8)%8)...)
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(out, text...), data.Bytes()...)
}

func writeVector(kind, base string, s schema, vector []float64) []byte {
	tensors, at := []tensor{}, 0
	for _, r := range s {
		tensors = append(tensors, tensor{r.name, "F32", r.shape, vector[at : at+r.size()]})
		at += r.size()
	}
	return writeTensors(kind, "f32", s.sha(), base, tensors)
}

// writeI8 writes a delta with its rows scaled to -127..127, and returns what a reader decodes. All numbers are float32.
func writeI8(base string, s schema, vector []float64) ([]byte, []float64) {
	tensors, decoded, at := []tensor{}, append([]float64{}, vector...), 0
	for _, r := range s {
		values := vector[at : at+r.size()]
		if len(r.shape) < 2 {
			tensors = append(tensors, tensor{r.name, "F32", r.shape, values})
			at += r.size()
			continue
		}
		q, scales := make([]float64, len(values)), []float64{}
		width := r.size() / r.shape[0]
		for first := 0; first < len(values); first += width {
			scale := rowScale(values[first : first+width])
			scales = append(scales, float64(scale))
			for i := first; i < first+width; i++ {
				if scale > 0 {
					q[i] = math.Max(-127, math.Min(127, math.RoundToEven(float64(float32(values[i])/scale))))
				}
				decoded[at+i] = float64(float32(q[i]) * scale)
			}
		}
		tensors = append(tensors, tensor{r.name, "I8", r.shape, q}, tensor{r.name + "#s", "F32", r.shape[:1], scales})
		at += r.size()
	}
	return writeTensors("delta", "i8", s.sha(), base, tensors), decoded
}

func rowScale(row []float64) float32 {
	most := 0.0
	for _, v := range row {
		most = math.Max(most, math.Abs(v))
	}
	need(most < math.Pow(2, 127), "not_finite", "an update is too large for i8")
	if scale := float32(most) / 127; scale >= float32(math.Pow(2, -126)) {
		return scale
	}
	return 0
}

// readVector reads a model, linear term or delta as the flat vector of a schema.
func readVector(file []byte, s schema, kind string) []float64 {
	entries, data := readTensors(file, s.sha(), kind)
	need(len(entries) == len(s), "bad_schema", "%d tensors where the schema has %d", len(entries), len(s))
	vector := make([]float64, 0, s.size())
	for _, r := range s {
		t, there := entries[r.name]
		need(there && t.dtype == "F32" && string(writeJSON(toAny(t.shape))) == string(writeJSON(toAny(r.shape))), "bad_schema", "tensor %s", r.name)
		for at := t.begin; at < t.end; at += 4 {
			v := float64(math.Float32frombits(binary.LittleEndian.Uint32(data[at:])))
			need(!math.IsNaN(v) && !math.IsInf(v, 0), "not_finite", "tensor %s", r.name)
			vector = append(vector, v)
		}
	}
	return vector
}

type entry struct {
	dtype      string
	shape      []int
	begin, end int64
}

func readTensors(file []byte, schemaSha, kind string) (map[string]entry, []byte) {
	need(len(file) >= 8, "bad_schema", "shorter than a tensor file's first number")
	size := binary.LittleEndian.Uint64(file)
	need(size%8 == 0 && size > 0 && size <= 1<<20 && size <= uint64(len(file)-8), "bad_schema", "length of the header")
	text, data := file[8:8+size], file[8+size:]
	need(text[0] == '{', "bad_schema", "the header is not an object")
	var header object
	need(attempt(func() { header = readObject(text) }) == nil, "bad_schema", "the header is not strict JSON")
	meta, ok := header["__metadata__"].(object)
	fc, isText := meta["fc"].(string)
	need(ok && len(meta) == 1 && isText, "bad_schema", "__metadata__ holds `fc` alone")
	var facts object
	need(attempt(func() { facts = readObject([]byte(fc)) }) == nil && string(writeJSON(facts)) == fc, "bad_schema", "`fc` is not canonical JSON")
	need(facts["v"] == int64(1), "bad_version", "v of a tensor file")
	_, hasBase := facts["base"]
	base, _ := facts["base"].(string)
	need(facts["codec"] == "f32" && hasBase == (facts["kind"] == "delta") && (!hasBase || base == "zero" || isSha.MatchString(base)), "bad_codec", "codec or base of a tensor file")
	need(facts["kind"] == kind && facts["schema"] == schemaSha, "bad_schema", "kind or schema of a tensor file")
	entries := map[string]entry{}
	delete(header, "__metadata__")
	need(len(header) >= 1 && len(header) <= 4096, "bad_schema", "%d tensors", len(header))
	order := []entry{}
	for name, value := range header {
		entries[name] = readEntry(value)
		order = append(order, entries[name])
	}
	sort.Slice(order, func(i, j int) bool { return order[i].begin < order[j].begin })
	at := int64(0)
	for _, e := range order {
		need(e.begin == at, "bad_schema", "the tensors leave a hole or overlap")
		at = e.end
	}
	need(at == int64(len(data)), "bad_schema", "the tensors do not cover the data")
	return entries, data
}

func readEntry(value any) (e entry) {
	fields, _ := value.(object)
	shape, isShape := fields["shape"].([]any)
	offsets, _ := fields["data_offsets"].([]any)
	e.dtype, _ = fields["dtype"].(string)
	item := int64(itemSize[e.dtype])
	need(len(fields) == 3 && isShape && len(shape) <= 8 && len(offsets) == 2 && item > 0, "bad_schema", "an entry of a tensor file")
	bytes := item
	for _, d := range shape {
		n, isInt := d.(int64)
		need(isInt && n >= 1 && n <= (1<<32)/bytes, "bad_schema", "a shape of a tensor file")
		bytes *= n
		e.shape = append(e.shape, int(n))
	}
	begin, okBegin := offsets[0].(int64)
	end, okEnd := offsets[1].(int64)
	e.begin, e.end = begin, end
	need(okBegin && okEnd && begin >= 0 && begin%item == 0 && end-begin == bytes, "bad_schema", "data_offsets of a tensor file")
	return
}
