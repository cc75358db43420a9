package main

// What a device adds to a sum: section 21. Noise, and the soft choices `shares` and `posterior`, are refused.

import (
	"crypto/rand"
	"encoding/binary"
	"math"
	"sort"
)

// trainedOnce is what a device trained for the sums of a round.
type trainedOnce struct {
	Run    string
	Round  int64
	Slot   string
	Models [][]float64
	mine
}

// mine is a choice among the centers: from the best to the worst, or soft weights without an order.
type mine struct {
	Weights []float64
	Order   []int
}

type choice struct {
	Run     string
	Weights []float64
}

func (m mine) among(open []int) []float64 {
	weights := make([]float64, len(m.Weights))
	for _, k := range m.Order {
		for _, o := range open {
			if o == k {
				weights[k] = 1
				return weights
			}
		}
	}
	for _, o := range open {
		weights[o] = m.Weights[o]
	}
	return weights
}

func (w *work) sum() *answer {
	w.lock.Lock()
	disk := w.disk // maps and pointers in it are replaced, never changed, by `after`
	w.lock.Unlock()
	answer := func(data []byte) *answer { return &answer{What: "masked", N: 1, Data: data} }
	change := func(f func(*memory)) { w.after = append(w.after, f) }
	message := func() []byte {
		m := readManifest(w.task["message"], "sum")
		w.ring.check(w.federation, m)
		return w.fetch(w.ctx, m)
	}
	place := func(s *sumOf, after int64) *sumOf {
		need(s != nil && w.task["run"] == s.Run && w.task["round"] == s.Round && w.task["exchange"] == s.Exchange+after, "bad_task", "a stage of another sum")
		copied := *s
		return &copied
	}
	switch w.task["stage"] {
	case "prekeys":
		return answer(w.offer(disk, change))
	case "shares":
		s := newSum(message(), w.federation, w.cid, func(number int64) []byte { return disk.Prekeys[number] })
		place(s, 0)
		change(func(d *memory) {
			left := map[int64][]byte{}
			for number, root := range d.Prekeys {
				if number != s.Number {
					left[number] = root
				}
			}
			d.Prekeys, d.Sums = left, map[string]*sumOf{s.Roster: s} // a roster ends the earlier sums
		})
		return answer(s.sharesMessage())
	case "show":
		text := message()
		s := place(disk.Sums[readSum(text, "roster:sha")["roster"].(string)], 2)
		said := s.reveal(text)
		change(func(d *memory) { d.Sums = map[string]*sumOf{} })
		return answer(said)
	}
	task := w.task["work"].(object)
	if w.task["stage"] == "keep" {
		trained, _, _ := w.trained(task)
		w.keep(text(task, "slot", "main"), trained)
		return answer([]byte{0})
	}
	words := w.words(task, disk)
	if w.task["stage"] == "tell" {
		told := []byte{}
		for _, word := range words {
			told = binary.LittleEndian.AppendUint32(told, word)
		}
		return answer(told)
	}
	relay := message()
	s := place(disk.Sums[readSum(relay, "roster:sha")["roster"].(string)], 1)
	scale := task["sum"].(object)["scale"].(object)
	need(scale["bits"] == s.Bits && s.Devices <= scale["devices"].(int64), "bad_task", "a sum that could overflow")
	s.takeRelay(relay)
	upload := s.mask(words)
	change(func(d *memory) { d.Sums = map[string]*sumOf{s.Roster: s} })
	return answer(upload)
}

// offer fills the unused prekeys up to 16 and tells them.
func (w *work) offer(disk memory, change func(func(*memory))) []byte {
	after := int64(-1)
	if number, there := w.task["after"].(int64); there {
		after = number
	}
	need(after <= disk.Offered+1000000, "bad_task", "prekeys after %d, where %d was the last one", after, disk.Offered)
	roots, numbers, next := map[int64][]byte{}, []int64{}, disk.Offered
	for number, root := range disk.Prekeys {
		if number > after {
			roots[number], numbers = root, append(numbers, number)
		}
	}
	if next < after {
		next = after
	}
	for len(numbers) < 16 {
		next++
		root := make([]byte, 32)
		if _, err := rand.Read(root); err != nil {
			panic(err)
		}
		roots[next], numbers = root, append(numbers, next)
	}
	sort.Slice(numbers, func(i, j int) bool { return numbers[i] < numbers[j] })
	change(func(d *memory) { d.Prekeys, d.Offered = roots, next })
	return prekeysMessage(numbers, roots)
}

// scale turns values in [-1, 1] into words.
type scale struct {
	levels, clip float64
	mask         uint32
	draw         func() float64 // of [0, 1), for roundings
}

// secretNumber is one of [0, 1) that nobody else can tell: roundings and scores are drawn from it.
func secretNumber() float64 {
	var drawn [8]byte
	_, err := rand.Read(drawn[:])
	need(err == nil, "internal", "no random numbers: %v", err)
	return float64(binary.LittleEndian.Uint64(drawn[:])>>11) / (1 << 53)
}

func newScale(fields object, draw func() float64) scale {
	bits, count := fields["bits"].(int64), fields["devices"].(int64)
	clip, _ := number(fields["clip"])
	noise, _ := number(fields["noise"])
	room := count + int64(math.Ceil(12*noise*math.Sqrt(float64(count))))
	levels := (int64(1)<<(bits-1) - 1) / room
	need(levels >= 1, "bad_task", "a sum of %d devices overflows", count)
	return scale{float64(levels), clip, uint32(1<<bits - 1), draw}
}

func (s scale) word(value float64) uint32 {
	return uint32(int64(math.Floor(math.Max(-1, math.Min(1, value))*s.levels+s.draw()))) & s.mask
}

func (w *work) words(task object, disk memory) []uint32 {
	sum := task["sum"].(object)
	noise, _ := number(sum["scale"].(object)["noise"])
	need(noise == 0, "bad_task", "this client adds no noise")
	var last []float64
	if disk.Choice.Run == w.task["run"] {
		last = disk.Choice.Weights
	}
	if task["job"] == "probe" {
		return w.evaluationWords(task, sum, last)
	}
	c := &contribution{task: task, sum: sum, scale: newScale(sum["scale"].(object), secretNumber)}
	for _, one := range list(sum["centers"]) {
		vector, _ := w.vector(one, "model")
		c.centers = append(c.centers, vector)
	}
	for _, k := range list(sum["open"]) {
		c.open = append(c.open, int(k.(int64)))
	}
	if sum["points"] != nil {
		m := readManifest(sum["points"], "points")
		w.ring.check(w.federation, m)
		c.points = readPoints(w.fetch(w.ctx, m), len(c.columns(c.centers[0])), len(c.centers))
	}
	once, slot := disk.Trained, text(task, "slot", "main")
	if once == nil || once.Run != w.task["run"] || once.Round != w.task["round"] || once.Slot != slot {
		once = &trainedOnce{w.task["run"].(string), w.task["round"].(int64), slot, nil, mine{}}
		once.Models, once.mine = w.trainFor(c, last)
	}
	kept, how := *once, sum["choose"]
	if (sum["part"] == "choose" || sum["part"] == "add") && how != "given" {
		if c.points != nil && sum["part"] == "choose" {
			kept.mine = c.nearest(kept.Models[0], nil)
		}
		chosen := choice{kept.Run, kept.among(c.open)}
		w.after = append(w.after, func(d *memory) { d.Choice = chosen })
	}
	w.after = append(w.after, func(d *memory) { d.Trained = &kept })
	return c.words(kept.Models, kept.mine)
}

// trainFor chooses a center where that comes first, trains once, and chooses where that comes after.
func (w *work) trainFor(c *contribution, last []float64) ([][]float64, mine) {
	var scores []float64
	switch c.sum["choose"] {
	case "only":
		scores = []float64{1}
	case "given":
		group, given := c.sum["group"].(int64)
		need(given && int(group) < len(c.centers), "bad_task", "no center is given")
		scores = make([]float64, len(c.centers))
		scores[group] = 1
	case "loss":
		losses, _ := w.evaluate(c.centers, w.train, nil)
		for _, of := range losses {
			scores = append(scores, -mean(of))
		}
	case "nearest":
	default:
		refuse("bad_task", "this client does not choose by %v", c.sum["choose"])
	}
	mu, _ := number(c.task["mu"])
	f := fitting{task: c.task, seed: uint64(c.task["seed"].(int64))}
	weights := scores
	if scores == nil {
		weights = last
	}
	part := c.sum["part"]
	if c.sum["choose"] == "given" || part == "count" || part == "points" || len(weights) != len(c.centers) {
		f.start = w.startOf(c.task) // without a pull
	} else {
		f.start, f.mu = c.centers[largestOf(weights)], mu
	}
	f.anchor = f.start
	move, moves := number(c.sum["move"])
	repeats, repeated := c.sum["repeats"].(int64)
	if !moves {
		move = 1
	}
	if !repeated {
		repeats = 1
	}
	vector, kept := []float64{}, []float64{}
	for again := int64(1); again <= repeats; again++ {
		kept, _ = w.steps(f)
		vector = make([]float64, len(kept))
		for i := range kept {
			vector[i] = f32(f.start[i] + move*(kept[i]-f.start[i]))
		}
		f.start, f.anchor, f.seed = vector, vector, (f.seed+1)%(1<<53)
	}
	if move == 1 {
		vector = kept
	}
	w.keep(text(c.task, "slot", "main"), kept)
	if scores == nil {
		return [][]float64{vector}, c.nearest(vector, last)
	}
	return [][]float64{vector}, ordered(scores)
}

func (w *work) startOf(task object) []float64 {
	if task["start"] == "own" {
		return w.own(text(task, "slot", "main"), task["init"])
	}
	vector, _ := w.vector(task["start"], "model")
	return vector
}
